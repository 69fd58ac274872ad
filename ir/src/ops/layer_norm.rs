//! `layer_norm`: each row minus its mean, over its deviation, times a weight, plus a bias.
//!
//! ```text
//! mean[*] = mean(x[* d])        rstd[*] = 1 / sqrt(mean((x - mean)^2) + eps)
//! y = (x - mean) * rstd * w + b, or * (1 + w) if zero-centred
//! ```
//!
//! With `residual`, `x` is the sum of two operands, which is a result as well.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::rms_norm::added;
use crate::ops::{
    Amaxes, Codes, Factors, GradCx, GradError, Grads, LayerNormGrad, LocalCx, Number, Numbers,
    OpDef, Real, Sample, TypeError, Types, Values, View, ViewMut, floats, is_default, leading,
    ndim, ndim_at_least, same_size, same_type,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `x`, `w`, `b`; results: `y`, `mean`, `rstd` (f32). With a
/// residual there is one more operand, `r`, and one more result, `x + r`; with codes, the scale is the last operand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerNorm {
    /// Added to the variance.
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

impl LayerNorm {
    /// Range of `eps`.
    pub const EPS: RealRange = RealRange::Positive;
}

impl OpDef for LayerNorm {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let inputs = self.codes.check(inputs, 3 + usize::from(self.residual))?;
        let x = inputs[0];
        floats(inputs, 0)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        ndim(inputs, 1, 1, "1 dim")?;
        ndim(inputs, 2, 1, "1 dim")?;
        same_size("features and weights", x.shape[x.ndim() - 1], inputs[1].shape[0])?;
        same_size("features and biases", x.shape[x.ndim() - 1], inputs[2].shape[0])?;
        let per_row = TensorType { dtype: DType::F32, shape: leading(&x.shape) };
        if self.residual {
            same_type(inputs, 3)?;
            return self.amax.infer(self.codes.infer(smallvec![
                x.clone(),
                per_row.clone(),
                per_row,
                x.clone()
            ])?);
        }
        self.amax.infer(self.codes.infer(smallvec![x.clone(), per_row.clone(), per_row])?)
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("eps", self.eps, LayerNorm::EPS)]
    }

    /// A padded row would become the bias.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = match self.residual {
            true => "* d, d, d, * d -> * d, *, *, * d",
            false => "* d, d, d -> * d, *, *",
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
        let (x, w, b) = (inputs[0], inputs[1], inputs[2]);
        let (results, amaxes) = self.amax.split(results);
        let (own, sum) = results.split_at_mut(3);
        let [y, mean, rstd] = own else { unreachable!("three results") };
        let n = x.last().max(1);
        let center = if self.zero_centered { T::one() } else { T::zero() };
        let stats = mean.data.iter_mut().zip(rstd.data.iter_mut());
        let x = added(x, self.codes.own(inputs).get(3), sum.first_mut());
        let rows = y.data.chunks_exact_mut(n).zip(x.chunks_exact(n));
        for ((y, x), (mean, rstd)) in rows.zip(stats) {
            let average = x.iter().map(|&it| it.to_f64()).sum::<f64>() / n as f64;
            let squares: f64 = x.iter().map(|&it| (it.to_f64() - average).powi(2)).sum();
            *mean = T::from_f64(average);
            *rstd = T::from_f64(1.0 / (squares / n as f64 + self.eps.0).sqrt());
            for j in 0..n {
                y[j] = (x[j] - *mean) * *rstd * (w.data[j] + center) + b.data[j];
            }
        }
        self.amax.reference(results, amaxes);
        self.codes.reference(inputs, results);
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (dy, x, w) = (cx.grad(0), cx.inputs[0], cx.inputs[1]);
        let (mean, rstd) = (cx.results[1], cx.results[2]);
        let op = LayerNormGrad { zero_centered: self.zero_centered, ..LayerNormGrad::default() };
        let res = cx.ops(&[0, 1, 2], op, &[dy, x, w, mean, rstd])?;
        Ok(res.into_iter().map(Some).collect())
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(LayerNorm { amax, ..self.clone() }.into())
    }

    fn by_products(&self) -> &'static [usize] {
        &[1, 2]
    }

    fn is_fused(&self) -> bool {
        self.residual
    }

    /// The norm is that of the sum as it is stored.
    fn rounds_inside(&self) -> bool {
        self.residual
    }

    fn samples() -> Vec<Sample> {
        let op = LayerNorm { eps: 1e-5.into(), ..LayerNorm::default() };
        let centered = LayerNorm { zero_centered: true, ..op.clone() };
        let residual = LayerNorm { residual: true, ..op.clone() };
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let amax = LayerNorm { amax: amaxes(vec![]), ..residual.clone() };
        let pieces = LayerNorm { amax: amaxes(vec![(0, 2), (1, 2)]), ..op.clone() };
        let codes = |to| Codes { of: [(0, to)].into() };
        let e4m3 = LayerNorm { codes: codes(DType::E4M3), ..amax.clone() };
        let e5m2 = LayerNorm { codes: codes(DType::E5M2), ..op.clone() };
        vec![
            Sample::floats(e4m3, &[&[2, 4, 6], &[6], &[6], &[2, 4, 6], &[]])
                .fill(4, Values::Positive),
            Sample::floats(e5m2, &[&[2, 4, 6], &[6], &[6], &[]]).fill(3, Values::Positive),
            Sample::floats(amax, &[&[2, 4, 6], &[6], &[6], &[2, 4, 6]]),
            Sample::floats(pieces, &[&[2, 4, 6], &[6], &[6]]),
            Sample::floats(residual, &[&[2, 4, 6], &[6], &[6], &[2, 4, 6]]),
            Sample::floats(op, &[&[2, 4, 6], &[6], &[6]]),
            Sample::floats(centered, &[&[4, 5], &[5], &[5]]),
        ]
    }
}
