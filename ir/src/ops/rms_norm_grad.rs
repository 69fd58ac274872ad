//! `rms_norm_grad`: gradients of `rms_norm` in `x` and in the weight.
//!
//! ```text
//! n = x * rstd        dn = dy * w        dx = rstd * (dn - n * mean(dn * n))        dw = sum(dy * n)
//! ```
//!
//! With `residual`, `dx` is added to an operand: the gradient that goes around the norm.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Amaxes, Factors, LocalCx, OpDef, Origin, Real, Sample, TypeError, Types, Values, View, ViewMut,
    arity, is_default, ndim, ndim_at_least, per_row, same_shape, same_size, single, type_of,
};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `dy`, `x`, `w`, `rstd`, and `dres` if there is a residual;
/// results: `dx`, `dw`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct RmsNormGrad {
    /// The weight is stored minus one.
    #[serde(skip_serializing_if = "is_default")]
    pub zero_centered: bool,
    /// Element type of `dw`; that of the weight if absent. Sums are in f32 in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out: Option<DType>,
    /// Adds a gradient that `x` gets elsewhere to `dx`, possibly in place.
    #[serde(skip_serializing_if = "is_default")]
    pub residual: bool,
    /// Also returns the amax of `dx`.
    #[serde(skip_serializing_if = "is_default")]
    pub amax: Amaxes,
}

impl OpDef for RmsNormGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 4 + usize::from(self.residual))?;
        let (x, w) = (inputs[1], inputs[2]);
        ndim_at_least(inputs, 1, 1, "at least 1 dim")?;
        same_shape(inputs[0], x)?;
        ndim(inputs, 2, 1, "1 dim")?;
        same_size("features and weights", x.shape[x.ndim() - 1], w.shape[0])?;
        per_row(x, inputs[3])?;
        single(inputs, 3)?;
        if self.residual {
            type_of(inputs, 4, 1)?;
        }
        let dw = w.with_dtype(self.out.unwrap_or(w.dtype));
        self.amax.infer(smallvec![x.clone(), dw])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = match self.residual {
            true => "* d, * d, d, *, * d -> * d, d",
            false => "* d, * d, d, * -> * d, d",
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
        let (own, around) = inputs.split_at(4);
        let [dy, x, w, rstd] = own else { unreachable!("four operands") };
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
        add_to(dx.data, around.first());
        self.amax.reference(results, amaxes);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.residual { &[(0, 4)] } else { &[] }
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(RmsNormGrad { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let op = RmsNormGrad::default();
        let centered = RmsNormGrad { zero_centered: true, ..op.clone() };
        let residual = RmsNormGrad { residual: true, ..op.clone() };
        let shapes: [&[u64]; 5] = [&[2, 4, 6], &[2, 4, 6], &[6], &[2, 4], &[2, 4, 6]];
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let amax = RmsNormGrad { amax: amaxes(vec![]), ..residual.clone() };
        let pieces = RmsNormGrad { amax: amaxes(vec![(0, 2), (1, 2)]), ..op.clone() };
        vec![
            Sample::floats(amax, &shapes).fill(3, Values::Positive),
            Sample::floats(pieces, &shapes[..4]).fill(3, Values::Positive),
            Sample::floats(residual, &shapes).fill(3, Values::Positive),
            Sample::floats(op, &[&[2, 4, 6], &[2, 4, 6], &[6], &[2, 4]]).fill(3, Values::Positive),
            Sample::floats(centered, &[&[4, 5], &[4, 5], &[5], &[4]]).fill(3, Values::Positive),
        ]
    }
}

/// Adds what goes around a norm to the gradient through it.
pub(crate) fn add_to<T: Real>(dx: &mut [T], around: Option<&View<'_, T>>) {
    let Some(around) = around else { return };
    dx.iter_mut().zip(around.data).for_each(|(dx, &it)| *dx += it);
}
