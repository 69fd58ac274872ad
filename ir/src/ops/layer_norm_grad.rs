//! `layer_norm_grad`: gradients of `layer_norm` in `x`, in the weight and in the bias.
//!
//! ```text
//! n = (x - mean) * rstd      dn = dy * w      dx = rstd * (dn - mean(dn) - n * mean(dn * n))
//! dw = sum(dy * n)           db = sum(dy)
//! ```
//!
//! With `residual`, `dx` is added to an operand: the gradient that goes around the norm.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::rms_norm_grad::add_to;
use crate::ops::{
    Amaxes, Factors, LocalCx, OpDef, Origin, Real, Sample, TypeError, Types, Values, View, ViewMut,
    arity, is_default, ndim, ndim_at_least, per_row, same_shape, same_size, single, type_of,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `dy`, `x`, `w`, `mean`, `rstd`, and `dres` if there is a
/// residual; results: `dx`, `dw`, `db`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerNormGrad {
    /// The weight is stored minus one.
    #[serde(skip_serializing_if = "is_default")]
    pub zero_centered: bool,
    /// Element type of `dw` and `db`; that of the weight if absent. Sums are in f32 in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
    /// Adds a gradient that `x` gets elsewhere to `dx`, possibly in place.
    #[serde(skip_serializing_if = "is_default")]
    pub residual: bool,
    /// Also returns the amax of `dx`.
    #[serde(skip_serializing_if = "is_default")]
    pub amax: Amaxes,
}

impl OpDef for LayerNormGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 5 + usize::from(self.residual))?;
        let (x, w) = (inputs[1], inputs[2]);
        ndim_at_least(inputs, 1, 1, "at least 1 dim")?;
        same_shape(inputs[0], x)?;
        ndim(inputs, 2, 1, "1 dim")?;
        same_size("features and weights", x.shape[x.ndim() - 1], w.shape[0])?;
        per_row(x, inputs[3])?;
        per_row(x, inputs[4])?;
        (3..5).try_for_each(|it| single(inputs, it))?;
        if self.residual {
            type_of(inputs, 5, 1)?;
        }
        let dw = w.with_dtype(self.out.unwrap_or(w.dtype));
        self.amax.infer(smallvec![x.clone(), dw.clone(), dw])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = match self.residual {
            true => "* d, * d, d, *, *, * d -> * d, d, d",
            false => "* d, * d, d, *, * -> * d, d, d",
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
        let (own, around) = inputs.split_at(5);
        let [dy, x, w, mean, rstd] = own else { unreachable!("five operands") };
        let [dx, dw, db] = results else { unreachable!("three results") };
        let n = x.last().max(1);
        let center = if self.zero_centered { T::one() } else { T::zero() };
        dw.data.fill(T::zero());
        db.data.fill(T::zero());
        let rows = dx.data.chunks_exact_mut(n).zip(x.data.chunks_exact(n));
        for (i, ((dx, x), dy)) in rows.zip(dy.data.chunks_exact(n)).enumerate() {
            let (mean, rstd) = (mean.data[i], rstd.data[i]);
            let (mut sum, mut dot) = (0.0, 0.0);
            for j in 0..n {
                let dn = dy[j] * (w.data[j] + center);
                sum += dn.to_f64();
                dot += (dn * (x[j] - mean)).to_f64();
            }
            let sum = T::from_f64(sum / n as f64);
            let dot = T::from_f64(dot / n as f64) * rstd;
            for j in 0..n {
                let normed = (x[j] - mean) * rstd;
                dx[j] = rstd * (dy[j] * (w.data[j] + center) - sum - normed * dot);
                dw.data[j] += dy[j] * normed;
                db.data[j] += dy[j];
            }
        }
        add_to(dx.data, around.first());
        self.amax.reference(results, amaxes);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.residual { &[(0, 5)] } else { &[] }
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(LayerNormGrad { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let op = LayerNormGrad::default();
        let centered = LayerNormGrad { zero_centered: true, ..op.clone() };
        let shapes: [&[u64]; 5] = [&[2, 4, 6], &[2, 4, 6], &[6], &[2, 4], &[2, 4]];
        let residual = LayerNormGrad { residual: true, ..op.clone() };
        let around: Vec<&[u64]> = shapes.iter().copied().chain([shapes[0]]).collect();
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let amax = LayerNormGrad { amax: amaxes(vec![]), ..residual.clone() };
        let pieces = LayerNormGrad { amax: amaxes(vec![(0, 2), (1, 2)]), ..op.clone() };
        vec![
            Sample::floats(amax, &around).fill(4, Values::Positive),
            Sample::floats(pieces, &shapes).fill(4, Values::Positive),
            Sample::floats(residual, &around).fill(4, Values::Positive),
            Sample::floats(op, &shapes).fill(4, Values::Positive),
            Sample::floats(centered, &[&[4, 5], &[4, 5], &[5], &[4], &[4]])
                .fill(4, Values::Positive),
        ]
    }
}
