//! `amax` on other ops: the amaxes of some of their results, each as one more result.
//!
//! What makes a tensor has read its amax on the way, so that [`Amax`] would read it for nothing.
//!
//! ```text
//! %y = glu %gate, %up                    %y, %y.amax = glu(amax:(of:[0])) %gate, %up
//! %y.amax = amax %y
//! ```
//!
//! The reference does not round a result before it takes the maximum of its magnitudes: rounding keeps their
//! order, so what is stored is the same.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::DimFactors;
use crate::ops::{
    Amax, Factor, Factors, Op, OpDef, Real, TypeError, Types, View, ViewMut, is_default,
};
use crate::placement::ReduceOp;
use crate::types::DType;

/// Amaxes of some of an op's results, as more results. They follow the op's own results, in the order of `of`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Amaxes {
    /// Results whose amax is given.
    pub of: Vec<usize>,
    /// As of [`Amax`], for all of them.
    #[serde(skip_serializing_if = "is_default")]
    pub pieces: Vec<(usize, u64)>,
}

impl Amaxes {
    /// Whether there are none.
    pub fn is_none(&self) -> bool {
        self.of.is_empty()
    }

    /// Whether each is one number, as kernels take it.
    pub fn are_numbers(&self) -> bool {
        self.pieces.iter().all(|it| it.1 == 1)
    }

    /// Of all results, the op's own.
    pub fn own<'a, T>(&self, results: &'a [T]) -> &'a [T] {
        &results[..results.len() - self.of.len()]
    }

    /// The op that makes each of them of its tensor alone.
    fn amax(&self) -> Amax {
        Amax { pieces: self.pieces.clone() }
    }

    /// Adds the types of the amaxes to those of the op's own results.
    pub(crate) fn infer(&self, mut own: Types) -> Result<Types, TypeError> {
        let distinct = self.of.iter().enumerate().all(|(i, it)| !self.of[..i].contains(it));
        if !distinct || self.of.iter().any(|&it| it >= own.len()) {
            return Err(TypeError::Attribute { why: "amaxes must be of different results" });
        }
        for &of in &self.of {
            // Of codes, it is that of what they are made of, before that is rounded.
            let of = match own[of].dtype.is_fp8() {
                true => own[of].with_dtype(DType::F32),
                false => own[of].clone(),
            };
            let amax = self.amax().infer(&[&of])?;
            own.extend(amax);
        }
        Ok(own)
    }

    /// Adds the amaxes to the factors of the op's own results: dims in pieces fall into two factors.
    pub(crate) fn factors(&self, mut factors: Factors) -> Factors {
        let Some(&of) = self.of.first() else { return factors };
        let mut pieces: Vec<DimFactors> = Vec::new();
        for (&(dim, n), name) in self.pieces.iter().zip('A'..) {
            let inner = factors.results[of][dim][0];
            let outer = factors.factors.len() as u8;
            let whole = factors.factors[inner as usize];
            factors.factors[inner as usize].size = whole.size / n;
            factors.factors.push(Factor { name, size: n, ..whole });
            for dims in factors.inputs.iter_mut().chain(&mut factors.results) {
                for it in dims.iter_mut().filter(|it| it[..] == [inner]) {
                    *it = smallvec![outer, inner];
                }
            }
            pieces.push(smallvec![outer]);
        }
        for _ in &self.of {
            factors.results.push(pieces.iter().cloned().collect());
            factors.reduce.push(ReduceOp::Max);
        }
        factors
    }

    /// Results, and amaxes of some of them.
    pub(crate) fn split<'a, 'b, T>(
        &self,
        results: &'a mut [ViewMut<'b, T>],
    ) -> (&'a mut [ViewMut<'b, T>], &'a mut [ViewMut<'b, T>]) {
        results.split_at_mut(results.len() - self.of.len())
    }

    /// Takes the amaxes of results that are made, before they are scaled.
    pub(crate) fn reference<T: Real>(&self, own: &[ViewMut<'_, T>], amaxes: &mut [ViewMut<'_, T>]) {
        for (&of, out) in self.of.iter().zip(amaxes) {
            self.amax().of(View { shape: own[of].shape, data: own[of].data }, out);
        }
    }

    /// As [`OpDef::localize`].
    pub(crate) fn localize(&self, results: &[&[u64]]) -> Option<Amaxes> {
        let counts = results.last().filter(|_| !self.pieces.is_empty())?;
        let pieces = self.pieces.iter().zip(*counts).map(|(it, &n)| (it.0, n)).collect();
        Some(Amaxes { of: self.of.clone(), pieces })
    }
}

/// The amaxes of an op, borrowed as asked: of those whose kernels take some.
macro_rules! amaxes {
    ($op:expr, $($borrow:tt)+) => {
        match $op {
            Op::AdamW(it) => Some($($borrow)+ it.amax),
            Op::Adam(it) => Some($($borrow)+ it.amax),
            Op::LayerNorm(it) => Some($($borrow)+ it.amax),
            Op::LayerNormGrad(it) => Some($($borrow)+ it.amax),
            Op::RmsNorm(it) => Some($($borrow)+ it.amax),
            Op::RmsNormGrad(it) => Some($($borrow)+ it.amax),
            _ => None,
        }
    };
}

impl Op {
    /// The amaxes that it gives of its results; `None` if it cannot give any.
    pub fn amaxes(&self) -> Option<&Amaxes> {
        amaxes!(self, &)
    }

    /// The same, to add some.
    pub fn amaxes_mut(&mut self) -> Option<&mut Amaxes> {
        amaxes!(self, &mut)
    }
}
