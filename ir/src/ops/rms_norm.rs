//! `rms_norm`: each row over its root mean square, times a weight; also returns one over the root.
//!
//! ```text
//! rstd[*] = 1 / sqrt(mean(x[* d]^2) + eps)        y = x * rstd * w, or * (1 + w) if zero-centred
//! ```
//!
//! With `residual`, `x` is the sum of two operands, which is a result as well: the residual addition
//! in front of a norm, without a pass of its own.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Amaxes, Codes, Factors, GradCx, GradError, Grads, LocalCx, Number, Numbers, OpDef, Real,
    RmsNormGrad, Sample, TypeError, Types, Values, View, ViewMut, floats, is_default, leading,
    ndim, ndim_at_least, same_size, same_type,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `x`, `w`; results: `y`, `rstd` (f32). With a residual there
/// is one more operand, `r`, and one more result, `x + r`; with codes, the scale is the last operand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: Number,
    /// The weight is stored minus one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub zero_centered: bool,
    /// Normalizes `x + r`, and returns that sum too.
    #[serde(default, skip_serializing_if = "is_default")]
    pub residual: bool,
    /// Also returns the amax of `y`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
    /// Gives `y` as codes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub codes: Codes,
}

impl RmsNorm {
    /// Range of `eps`.
    pub const EPS: RealRange = RealRange::Positive;
}

impl OpDef for RmsNorm {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let inputs = self.codes.check(inputs, 2 + usize::from(self.residual))?;
        let x = inputs[0];
        floats(inputs, 0)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        ndim(inputs, 1, 1, "1 dim")?;
        same_size("features and weights", x.shape[x.ndim() - 1], inputs[1].shape[0])?;
        let rstd = TensorType { dtype: DType::F32, shape: leading(&x.shape) };
        if self.residual {
            same_type(inputs, 2)?;
            return self.amax.infer(self.codes.infer(smallvec![x.clone(), rstd, x.clone()])?);
        }
        self.amax.infer(self.codes.infer(smallvec![x.clone(), rstd])?)
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("eps", self.eps, RmsNorm::EPS)]
    }

    /// The `rstd` of a padded row would not be zero.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = match self.residual {
            true => "* d, d, * d -> * d, *, * d",
            false => "* d, d -> * d, *",
        };
        let (inputs, own) = (self.codes.own(inputs), self.amax.own(results));
        let own = Factors::new(text, inputs, own).whole("d").even("*");
        self.amax.factors(self.codes.factors(own))
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (x, w) = (inputs[0], inputs[1]);
        let n = x.last().max(1);
        let center = if self.zero_centered { T::one() } else { T::zero() };
        let (results, amaxes) = self.amax.split(results);
        let (own, sum) = results.split_at_mut(2);
        let [y, rstd] = own else { unreachable!("two results") };
        let x = added(x, self.codes.own(inputs).get(2), sum.first_mut());
        let rows = y.data.chunks_exact_mut(n).zip(x.chunks_exact(n));
        for ((y, x), rstd) in rows.zip(rstd.data.iter_mut()) {
            let squares: f64 = x.iter().map(|&it| it.to_f64() * it.to_f64()).sum();
            *rstd = T::from_f64(1.0 / (squares / n as f64 + self.eps.0).sqrt());
            for (y, (&x, &w)) in y.iter_mut().zip(x.iter().zip(w.data)) {
                *y = x * *rstd * (w + center);
            }
        }
        self.amax.reference(results, amaxes);
        self.codes.reference(inputs, results);
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (dy, x, w, rstd) = (cx.grad(0), cx.inputs[0], cx.inputs[1], cx.results[1]);
        let op = RmsNormGrad { zero_centered: self.zero_centered, ..RmsNormGrad::default() };
        let res = cx.ops(&[0, 1], op, &[dy, x, w, rstd])?;
        Ok(res.into_iter().map(Some).collect())
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(RmsNorm { amax, ..self.clone() }.into())
    }

    fn by_products(&self) -> &'static [usize] {
        &[1]
    }

    fn is_fused(&self) -> bool {
        self.residual
    }

    /// The norm is that of the sum as it is stored.
    fn rounds_inside(&self) -> bool {
        self.residual
    }

    fn samples() -> Vec<Sample> {
        let op = RmsNorm { eps: 1e-5.into(), ..RmsNorm::default() };
        let centered = RmsNorm { zero_centered: true, ..op.clone() };
        let residual = RmsNorm { residual: true, ..centered.clone() };
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let amax = RmsNorm { amax: amaxes(vec![]), ..residual.clone() };
        let pieces = RmsNorm { amax: amaxes(vec![(0, 2), (1, 2)]), ..op.clone() };
        let codes = |to| Codes { of: [(0, to)].into() };
        let e4m3 = RmsNorm { codes: codes(DType::E4M3), ..amax.clone() };
        let e5m2 = RmsNorm { codes: codes(DType::E5M2), ..op.clone() };
        vec![
            Sample::floats(e4m3, &[&[2, 4, 6], &[6], &[2, 4, 6], &[]]).fill(3, Values::Positive),
            Sample::floats(e5m2, &[&[2, 4, 6], &[6], &[]]).fill(2, Values::Positive),
            Sample::floats(amax, &[&[2, 4, 6], &[6], &[2, 4, 6]]),
            Sample::floats(pieces, &[&[2, 4, 6], &[6]]),
            Sample::floats(residual, &[&[2, 4, 6], &[6], &[2, 4, 6]]),
            Sample::floats(op, &[&[2, 4, 6], &[6]]),
            Sample::floats(centered, &[&[4, 5], &[5]]),
        ]
    }
}

/// What a norm with an optional residual normalizes: `x`, or `x + r`, which it leaves in `sum`.
pub(crate) fn added<'a, T: Real>(
    x: View<'a, T>,
    r: Option<&View<'a, T>>,
    sum: Option<&'a mut ViewMut<'_, T>>,
) -> &'a [T] {
    let (Some(r), Some(sum)) = (r, sum) else { return x.data };
    for (sum, (&x, &r)) in sum.data.iter_mut().zip(x.data.iter().zip(r.data)) {
        *sum = x + r;
    }
    sum.data
}
