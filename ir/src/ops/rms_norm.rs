//! `rms_norm`: each row over its root mean square, times a weight; also returns one over the root.
//!
//! ```text
//! rstd[*] = 1 / sqrt(mean(x[* d]^2) + eps)        y = x * rstd * w, or * (1 + w) if zero-centred
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GradCx, GradError, Grads, LocalCx, Number, OpDef, Real, RmsNormGrad, Sample, TypeError,
    Types, View, ViewMut, arity, floats, is_default, leading, ndim, ndim_at_least, same_size,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `x`, `w`; results: `y`, `rstd` (f32).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: Number,
    /// The weight is stored minus one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub zero_centered: bool,
}

impl OpDef for RmsNorm {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        let x = inputs[0];
        floats(inputs, 0)?;
        if !(self.eps.0 >= 0.0 && self.eps.0.is_finite()) {
            return Err(TypeError::Attribute { why: "eps must be at least 0, and finite" });
        }
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        ndim(inputs, 1, 1, "1 dim")?;
        same_size("features and weights", x.shape[x.ndim() - 1], inputs[1].shape[0])?;
        Ok(smallvec![x.clone(), TensorType { dtype: DType::F32, shape: leading(&x.shape) }])
    }

    /// The `rstd` of a padded row would not be zero.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* d, d -> * d, *", inputs, results).whole("d").even("*")
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
        let [y, rstd] = results else { unreachable!("two results") };
        let rows = y.data.chunks_exact_mut(n).zip(x.data.chunks_exact(n));
        for ((y, x), rstd) in rows.zip(rstd.data.iter_mut()) {
            let squares: f64 = x.iter().map(|&it| it.to_f64() * it.to_f64()).sum();
            *rstd = T::from_f64(1.0 / (squares / n as f64 + self.eps.0).sqrt());
            for (y, (&x, &w)) in y.iter_mut().zip(x.iter().zip(w.data)) {
                *y = x * *rstd * (w + center);
            }
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (dy, x, w, rstd) = (cx.only(0)?, cx.inputs[0], cx.inputs[1], cx.results[1]);
        let op = RmsNormGrad { zero_centered: self.zero_centered, out: None };
        let res = cx.ops(&[0, 1], op, &[dy, x, w, rstd])?;
        Ok(res.into_iter().map(Some).collect())
    }

    fn samples() -> Vec<Sample> {
        let op = RmsNorm { eps: 1e-5.into(), zero_centered: false };
        let centered = RmsNorm { zero_centered: true, ..op.clone() };
        vec![
            Sample::floats(op, &[&[2, 4, 6], &[6]]),
            Sample::floats(centered, &[&[4, 5], &[5]]),
        ]
    }
}
