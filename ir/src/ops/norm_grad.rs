//! `rms_norm_grad` and `layer_norm_grad`: gradients of the norms in `x`, in the weight and in the bias.
//!
//! ```text
//! n = (x - mean) * rstd      dn = dy * w      dx = rstd * (dn - mean(dn) - n * mean(dn * n))
//! dw = sum(dy * n)           db = sum(dy)
//! ```
//!
//! An RMS norm has no `mean`, no `mean(dn)` and no bias. With `residual`, `dx` is added to an operand: the gradient that
//! goes around the norm.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Amaxes, Factors, LocalCx, Op, OpDef, Origin, Real, Sample, TypeError, Types, Values, View,
    ViewMut, arity, is_default, ndim, ndim_at_least, per_row, same_shape, same_size, single,
    type_of,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `dy`, `x`, `w`, `mean` of a layer norm, `rstd`, and `dres` if there is a
/// residual; results: `dx`, `dw`, and `db` of a layer norm.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NormGrad<const LAYER: bool> {
    /// The weight is stored minus one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub zero_centered: bool,
    /// Element type of `dw` and `db`; that of the weight if absent. Sums are in f32 in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
    /// Adds a gradient that `x` gets elsewhere to `dx`, possibly in place.
    #[serde(default, skip_serializing_if = "is_default")]
    pub residual: bool,
    /// Also returns the amax of `dx`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
}

impl<const LAYER: bool> NormGrad<LAYER> {
    /// The number of operands without a residual.
    pub const PLAIN: usize = if LAYER { 5 } else { 4 };
}

impl<const LAYER: bool> OpDef for NormGrad<LAYER>
where
    NormGrad<LAYER>: Into<Op>,
{
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, Self::PLAIN + usize::from(self.residual))?;
        let (x, w) = (inputs[1], inputs[2]);
        ndim_at_least(inputs, 1, 1, "at least 1 dim")?;
        same_shape(inputs[0], x)?;
        ndim(inputs, 2, 1, "1 dim")?;
        same_size("features and weights", x.shape[x.ndim() - 1], w.shape[0])?;
        for statistic in 3..Self::PLAIN {
            per_row(x, inputs[statistic])?;
            single(inputs, statistic)?;
        }
        if self.residual {
            type_of(inputs, Self::PLAIN, 1)?;
        }
        let mut res: Types = smallvec![x.clone()];
        res.resize(Self::PLAIN - 2, w.with_dtype(self.out.unwrap_or(w.dtype)));
        self.amax.infer(res)
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = match (LAYER, self.residual) {
            (false, false) => "* d, * d, d, * -> * d, d",
            (false, true) => "* d, * d, d, *, * d -> * d, d",
            (true, false) => "* d, * d, d, *, * -> * d, d, d",
            (true, true) => "* d, * d, d, *, *, * d -> * d, d, d",
        };
        let own = Factors::new(text, inputs, self.amax.own(results)).whole("d");
        self.amax.factors(own)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (results, amaxes) = self.amax.split(results);
        let (own, around) = inputs.split_at(Self::PLAIN);
        let [dy, x, w, mean, ..] = own else { unreachable!("four operands or more") };
        let rstd = own[Self::PLAIN - 1];
        let [dx, dw, db @ ..] = results else { unreachable!("two results or more") };
        let n = x.last().max(1);
        let center = if self.zero_centered { T::one() } else { T::zero() };
        dw.data.fill(T::zero());
        db.iter_mut().for_each(|it| it.data.fill(T::zero()));
        let rows = dx.data.chunks_exact_mut(n).zip(x.data.chunks_exact(n));
        for (i, ((dx, x), dy)) in rows.zip(dy.data.chunks_exact(n)).enumerate() {
            let rstd = rstd.data[i];
            let mean = if LAYER { mean.data[i] } else { T::zero() };
            let (mut sum, mut dot) = (0.0, 0.0);
            for j in 0..n {
                let dn = dy[j] * (w.data[j] + center);
                sum += if LAYER { dn.to_f64() } else { 0.0 };
                dot += (dn * (x[j] - mean)).to_f64();
            }
            let sum = T::from_f64(sum / n as f64);
            let dot = T::from_f64(dot / n as f64) * rstd;
            for j in 0..n {
                let normed = (x[j] - mean) * rstd;
                dx[j] = rstd * (dy[j] * (w.data[j] + center) - sum - normed * dot);
                dw.data[j] += dy[j] * normed;
                db.iter_mut().for_each(|it| it.data[j] += dy[j]);
            }
        }
        if let Some(around) = around.first() {
            dx.data.iter_mut().zip(around.data).for_each(|(dx, &it)| *dx += it);
        }
        self.amax.reference(results, amaxes);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        match (self.residual, LAYER) {
            (false, _) => &[],
            (true, false) => &[(0, 4)],
            (true, true) => &[(0, 5)],
        }
    }

    fn localize(&self, results: &[&[u64]]) -> Option<Op> {
        let amax = self.amax.localize(results)?;
        Some(NormGrad { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let op = Self::default();
        let centered = Self { zero_centered: true, ..op.clone() };
        let residual = Self { residual: true, ..op.clone() };
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let amax = Self { amax: amaxes(vec![]), ..residual.clone() };
        let pieces = Self { amax: amaxes(vec![(0, 2), (1, 2)]), ..op.clone() };
        let sample = |op: Self, x: &[u64]| {
            let (d, rows) = (&x[x.len() - 1..], &x[..x.len() - 1]);
            let mut shapes = vec![x, x, d, rows, rows];
            shapes.truncate(Self::PLAIN);
            shapes.extend(op.residual.then_some(x));
            Sample::floats(op, &shapes).fill(Self::PLAIN - 1, Values::Positive)
        };
        let large = [amax, pieces, residual, op].map(|it| sample(it, &[2, 4, 6]));
        large.into_iter().chain([sample(centered, &[4, 5])]).collect()
    }
}
