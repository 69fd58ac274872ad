//! `rms_norm` and `layer_norm`: each row over its size, times a weight; also returns the statistics of rows.
//!
//! ```text
//! rms_norm      rstd[*] = 1 / sqrt(mean(x[* d]^2) + eps)               y = x * rstd * w
//! layer_norm    mean[*] = mean(x[* d])
//!               rstd[*] = 1 / sqrt(mean((x - mean)^2) + eps)           y = (x - mean) * rstd * w + b
//! ```
//!
//! With a zero-centred weight, `1 + w` takes the place of `w`.
//!
//! With `residual`, `x` is the sum of two operands, which is a result as well: the residual addition
//! in front of a norm, without a pass of its own.

use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

use crate::ops::norm_grad::NormGrad;
use crate::ops::{
    Amaxes, Codes, Factors, GradCx, GradError, Grads, LocalCx, Number, Numbers, Op, OpDef, Real,
    Sample, TypeError, Types, Values, View, ViewMut, floats, is_default, leading, ndim,
    ndim_at_least, same_size, same_type,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `x`, `w`, and `b` of a layer norm; results: `y`, `mean` of a layer norm, and
/// `rstd`, both f32. With a residual there is one more operand, `r`, and one more result, `x + r`; with codes, the scale
/// is the last operand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Norm<const LAYER: bool> {
    /// Added to the mean square, or to the variance.
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

impl<const LAYER: bool> Norm<LAYER> {
    /// Range of `eps`.
    pub const EPS: RealRange = RealRange::Positive;
    /// The number of operands, and of results, but for what options add.
    pub const PLAIN: usize = if LAYER { 3 } else { 2 };
}

impl<const LAYER: bool> OpDef for Norm<LAYER>
where
    Norm<LAYER>: Into<Op>,
    NormGrad<LAYER>: Into<Op>,
{
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let inputs = self.codes.check(inputs, Self::PLAIN + usize::from(self.residual))?;
        let x = inputs[0];
        floats(inputs, 0)?;
        ndim_at_least(inputs, 0, 1, "at least 1 dim")?;
        for (operand, what) in
            [(1, "features and weights"), (2, "features and biases")].iter().take(Self::PLAIN - 1)
        {
            ndim(inputs, *operand, 1, "1 dim")?;
            same_size(what, x.shape[x.ndim() - 1], inputs[*operand].shape[0])?;
        }
        let per_row = TensorType { dtype: DType::F32, shape: leading(&x.shape) };
        let mut res: Types = smallvec![x.clone()];
        res.resize(Self::PLAIN, per_row);
        if self.residual {
            same_type(inputs, Self::PLAIN)?;
            res.push(x.clone());
        }
        self.amax.infer(self.codes.infer(res)?)
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("eps", self.eps, Self::EPS)]
    }

    /// The `rstd` of a padded row would not be zero, and its `y` the bias.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = match (LAYER, self.residual) {
            (false, false) => "* d, d -> * d, *",
            (false, true) => "* d, d, * d -> * d, *, * d",
            (true, false) => "* d, d, d -> * d, *, *",
            (true, true) => "* d, d, d, * d -> * d, *, *, * d",
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
        let (own, sum) = results.split_at_mut(Self::PLAIN);
        let [y, stats @ ..] = own else { unreachable!("there is a result") };
        let x = added(x, self.codes.own(inputs).get(Self::PLAIN), sum.first_mut());
        for (i, (y, x)) in y.data.chunks_exact_mut(n).zip(x.chunks_exact(n)).enumerate() {
            let average = match LAYER {
                true => x.iter().map(|&it| it.to_f64()).sum::<f64>() / n as f64,
                false => 0.0,
            };
            let squares: f64 = x.iter().map(|&it| (it.to_f64() - average).powi(2)).sum();
            let mean = T::from_f64(average);
            let rstd = T::from_f64(1.0 / (squares / n as f64 + self.eps.0).sqrt());
            // The mean comes first.
            for (out, &it) in stats.iter_mut().rev().zip(&[rstd, mean]) {
                out.data[i] = it;
            }
            for j in 0..n {
                y[j] = (x[j] - mean) * rstd * (w.data[j] + center);
                if LAYER {
                    y[j] += inputs[2].data[j];
                }
            }
        }
        self.amax.reference(results, amaxes);
        self.codes.reference(inputs, results);
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let mut operands: SmallVec<[_; 5]> = smallvec![cx.grad(0), cx.inputs[0], cx.inputs[1]];
        operands.extend_from_slice(&cx.results[1..]);
        let op = NormGrad::<LAYER> { zero_centered: self.zero_centered, ..NormGrad::default() };
        let res = cx.ops(&[0, 1, 2][..Self::PLAIN], op, &operands)?;
        Ok(res.into_iter().map(Some).collect())
    }

    fn localize(&self, results: &[&[u64]]) -> Option<Op> {
        let amax = self.amax.localize(results)?;
        Some(Norm { amax, ..self.clone() }.into())
    }

    fn by_products(&self) -> &'static [usize] {
        if LAYER { &[1, 2] } else { &[1] }
    }

    fn is_fused(&self) -> bool {
        self.residual
    }

    /// The norm is that of the sum as it is stored.
    fn rounds_inside(&self) -> bool {
        self.residual
    }

    fn samples() -> Vec<Sample> {
        let op = Self { eps: 1e-5.into(), ..Self::default() };
        let centered = Self { zero_centered: true, ..op.clone() };
        let residual = Self { residual: true, ..centered.clone() };
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let amax = Self { amax: amaxes(vec![]), ..residual.clone() };
        let pieces = Self { amax: amaxes(vec![(0, 2), (1, 2)]), ..op.clone() };
        let codes = |to| Codes { of: [(0, to)].into() };
        let e4m3 = Self { codes: codes(DType::E4M3), ..amax.clone() };
        let e5m2 = Self { codes: codes(DType::E5M2), ..op.clone() };
        let sample = |op: Self, x: &[u64]| {
            let d = &x[x.len() - 1..];
            let mut shapes = vec![x, d, d];
            shapes.truncate(Self::PLAIN);
            shapes.extend(op.residual.then_some(x));
            let n = shapes.len();
            shapes.extend(op.codes.of.iter().map(|_| &[][..]));
            let scales = n..shapes.len();
            scales.fold(Sample::floats(op, &shapes), |it, i| it.fill(i, Values::Positive))
        };
        let large = [e4m3, e5m2, amax, pieces, residual, op].map(|it| sample(it, &[2, 4, 6]));
        large.into_iter().chain([sample(centered, &[4, 5])]).collect()
    }
}

/// What a norm with an optional residual normalizes: `x`, or `x + r`, which it leaves in `sum`.
fn added<'a, T: Real>(
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
