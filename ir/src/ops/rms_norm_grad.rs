//! `rms_norm_grad`: gradients of `rms_norm` in `x` and in the weight.
//!
//! ```text
//! n = x * rstd        dn = dy * w        dx = rstd * (dn - n * mean(dn * n))        dw = sum(dy * n)
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, OpDef, Real, Sample, TypeError, Types, Values, View, ViewMut, arity,
    is_default, ndim, ndim_at_least, per_row, same_shape, same_size,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `dy`, `x`, `w`, `rstd`; results: `dx`, `dw`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct RmsNormGrad {
    /// The weight is stored minus one.
    #[serde(skip_serializing_if = "is_default")]
    pub zero_centered: bool,
    /// Element type of `dw`; that of the weight if absent. Sums are in f32 in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
}

impl OpDef for RmsNormGrad {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 4)?;
        let (x, w) = (inputs[1], inputs[2]);
        ndim_at_least(inputs, 1, 1, "at least 1 dim")?;
        same_shape(inputs[0], x)?;
        ndim(inputs, 2, 1, "1 dim")?;
        same_size("features and weights", x.shape[x.ndim() - 1], w.shape[0])?;
        per_row(x, inputs[3])?;
        Ok(smallvec![x.clone(), w.with_dtype(self.out.unwrap_or(w.dtype))])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* d, * d, d, * -> * d, d", inputs, results).whole("d")
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [dy, x, w, rstd] = inputs else { unreachable!("four operands") };
        let [dx, dw] = results else { unreachable!("two results") };
        let n = x.last().max(1);
        let center = if self.zero_centered { T::one() } else { T::zero() };
        dw.data.fill(T::zero());
        let rows = dx.data.chunks_exact_mut(n).zip(x.data.chunks_exact(n));
        for (((dx, x), dy), &rstd) in rows.zip(dy.data.chunks_exact(n)).zip(rstd.data) {
            let products = dy.iter().zip(x).zip(w.data);
            let dot: f64 = products.map(|((&dy, &x), &w)| (dy * (w + center) * x).to_f64()).sum();
            let mean = T::from_f64(dot / n as f64) * rstd;
            for j in 0..n {
                let normed = x[j] * rstd;
                dx[j] = rstd * (dy[j] * (w.data[j] + center) - normed * mean);
                dw.data[j] += dy[j] * normed;
            }
        }
    }

    fn samples() -> Vec<Sample> {
        let op = RmsNormGrad::default();
        let centered = RmsNormGrad { zero_centered: true, ..op.clone() };
        vec![
            Sample::floats(op, &[&[2, 4, 6], &[2, 4, 6], &[6], &[2, 4]]).fill(3, Values::Positive),
            Sample::floats(centered, &[&[4, 5], &[4, 5], &[5], &[4]]).fill(3, Values::Positive),
        ]
    }
}
