//! `sums` on other ops: sums of some of their results over all dims but the last, each as one more result.
//!
//! The gradient of a bias is such a sum, and what quantizes a gradient has read all that it is the sum of:
//!
//! ```text
//! %db = sum_leading %dy                  %dy.codes, %db = quantize(to:e5m2,sums:(of:[(0,bf16)])) %dy, %s
//! %dy.codes = quantize(to:e5m2) %dy, %s
//! ```
//!
//! It is the sum of what is quantized, before that is rounded: in f32, as codes are made of it, and stored in a type
//! of its own (`te-spec` 1.8).

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::ops::sum_leading::sum_rows;
use crate::ops::{Factors, Op, Real, TypeError, Types, ViewMut, ndim_at_least};
use crate::placement::ReduceOp;
use crate::types::{DType, TensorType};

/// Sums over all dims but the last: of results of the shape of operand 0, and of `quantize`, whose result 0 stands for
/// its operand, of that. They follow all other results, in the order of `of`. Shape: the last dim of operand 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sums {
    /// Which results, and the type in which the sum is stored. A box is a third smaller than a `Vec`, and there is one
    /// in every node.
    pub of: Box<[(usize, DType)]>,
}

static NONE: LazyLock<Sums> = LazyLock::new(Sums::default);

impl Sums {
    /// Whether there are none.
    pub fn is_none(&self) -> bool {
        self.of.is_empty()
    }

    /// Adds the sum of a result, in this type.
    pub fn push(&mut self, sum: (usize, DType)) {
        self.of = std::mem::take(&mut self.of).into_iter().chain([sum]).collect();
    }

    /// Of all results, those in front of the sums.
    pub fn before<'a, T>(&self, results: &'a [T]) -> &'a [T] {
        &results[..results.len() - self.of.len()]
    }

    /// Adds the types of the sums to those of the results in front of them, of which the first `n_own` have the shape
    /// of operand 0.
    pub(crate) fn infer(
        &self,
        inputs: &[&TensorType],
        n_own: usize,
        mut results: Types,
    ) -> Result<Types, TypeError> {
        for (i, &(of, to)) in self.of.iter().enumerate() {
            ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
            if of >= n_own {
                return Err(TypeError::Attribute { why: "sums must be of results that it has" });
            }
            if self.of[..i].iter().any(|it| it.0 == of) {
                return Err(TypeError::Attribute { why: "sums must be of different results" });
            }
            if !to.is_float() {
                return Err(TypeError::Attribute { why: "sums are f32 or bf16" });
            }
            let x = inputs[0];
            results.push(TensorType::new(to, &x.shape[x.ndim() - 1..]));
        }
        Ok(results)
    }

    /// Adds the sums to the factors of all else: they lack those of leading dims.
    pub(crate) fn factors(&self, mut factors: Factors) -> Factors {
        for _ in &self.of {
            let last = factors.inputs[0].last().cloned();
            factors.results.push(last.into_iter().collect());
            factors.reduce.push(ReduceOp::Sum);
        }
        factors
    }

    /// The results in front of the sums, and these.
    pub(crate) fn split<'a, 'b, T>(
        &self,
        results: &'a mut [ViewMut<'b, T>],
    ) -> (&'a mut [ViewMut<'b, T>], &'a mut [ViewMut<'b, T>]) {
        results.split_at_mut(results.len() - self.of.len())
    }

    /// Takes the sums of results that are made, before they are scaled.
    pub(crate) fn reference<T: Real>(&self, own: &[ViewMut<'_, T>], sums: &mut [ViewMut<'_, T>]) {
        for (&(of, _), out) in self.of.iter().zip(sums) {
            sum_rows(own[of].data, out.data);
        }
    }
}

/// The sums of an op, borrowed as asked: of those whose kernels take some.
macro_rules! sums {
    ($op:expr, $($borrow:tt)+) => {
        match $op {
            Op::ActivationGrad(it) => Some($($borrow)+ it.sums),
            Op::GluGrad(it) => Some($($borrow)+ it.sums),
            Op::Quantize(it) => Some($($borrow)+ it.sums),
            _ => None,
        }
    };
}

impl Op {
    /// The sums that it gives of its results.
    pub fn sums(&self) -> &Sums {
        sums!(self, &).unwrap_or(&NONE)
    }

    /// The same, to add some; `None` if it cannot give any.
    pub fn sums_mut(&mut self) -> Option<&mut Sums> {
        sums!(self, &mut)
    }
}
