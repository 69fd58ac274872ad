//! `adamw`: one step of Adam with decoupled weight decay, in PyTorch's arithmetic.
//!
//! ```text
//! g *= scale          p *= 1 - lr * weight_decay                      t = step, from 1
//! m += (1 - beta1) * (g - m)                 v = beta2 * v + (1 - beta2) * g^2
//! p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Amaxes, Factors, LocalCx, Number, Numbers, OpDef, Origin, Real, Sample, TypeError, Types,
    Values, View, ViewMut, arity, is_default, same_shape, scalar,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `p`, `m`, `v`, `g`, `scale`, `lr`, `step`; results: `p`,
/// `m`, `v`, and `p` in the type `compute` if there is one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdamW {
    /// Decay rate of the first moment.
    pub beta1: Number,
    /// Decay rate of the second moment.
    pub beta2: Number,
    /// Added to the root of the second moment; not 0, or padding would not stay zero.
    pub eps: Number,
    /// Decoupled decay.
    #[serde(default, skip_serializing_if = "is_default")]
    pub weight_decay: Number,
    /// Also returns the new `p` in this type, for what computes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<DType>,
    /// Also returns the amax of the new `p`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
}

/// The attributes `beta1`, `beta2`, `eps` and `weight_decay` of an Adam, with their ranges.
pub(crate) fn adam_numbers([beta1, beta2, eps, weight_decay]: [Number; 4]) -> Numbers {
    smallvec![
        Ranged::new("beta1", beta1, AdamW::BETA),
        Ranged::new("beta2", beta2, AdamW::BETA),
        Ranged::new("eps", eps, AdamW::EPS),
        Ranged::new("weight_decay", weight_decay, AdamW::WEIGHT_DECAY),
    ]
}

/// Checks the operands of an Adam.
pub(crate) fn infer_adam(
    inputs: &[&TensorType],
    compute: Option<DType>,
    amax: &Amaxes,
) -> Result<Types, TypeError> {
    arity(inputs, 7)?;
    for operand in &inputs[1..4] {
        same_shape(inputs[0], operand)?;
    }
    for operand in 4..7 {
        scalar(inputs, operand)?;
    }
    let compute = compute.map(|it| inputs[0].with_dtype(it));
    amax.infer(inputs[..3].iter().map(|&it| it.clone()).chain(compute).collect())
}

/// [`OpDef::factors`] of an Adam.
pub(crate) fn adam_factors(
    inputs: &[&TensorType],
    results: &[&TensorType],
    amax: &Amaxes,
) -> Factors {
    let own = amax.own(results);
    let text = match own.len() {
        3 => "*, *, *, *, , , -> *, *, *",
        _ => "*, *, *, *, , , -> *, *, *, *",
    };
    amax.factors(Factors::new(text, inputs, own))
}

/// The numbers of one step of an Adam.
pub(crate) struct AdamStep<T> {
    /// Factor of gradients.
    pub scale: T,
    /// Weight of the gradient in the first moment.
    pub weight1: T,
    /// Weight of the moment in the second moment.
    pub beta2: T,
    /// Weight of the squared gradient in it.
    pub weight2: T,
    /// Learning rate over the first moment's bias.
    pub rate: T,
    /// Root of the second moment's bias.
    pub root: T,
    /// Added to the root of the second moment.
    pub eps: T,
}

impl<T: Real> AdamStep<T> {
    /// From the attributes, and the scalar operands of one of the Adams.
    pub(crate) fn new([beta1, beta2, eps]: [Number; 3], inputs: &[View<'_, T>]) -> AdamStep<T> {
        let number = |i: usize| inputs[i].data[0].to_f64();
        let (scale, lr, step) = (number(4), number(5), number(6));
        AdamStep {
            scale: T::from_f64(scale),
            weight1: T::from_f64(1.0 - beta1.0),
            beta2: T::from_f64(beta2.0),
            weight2: T::from_f64(1.0 - beta2.0),
            rate: T::from_f64(lr / (1.0 - beta1.0.powf(step))),
            root: T::from_f64((1.0 - beta2.0.powf(step)).sqrt()),
            eps: T::from_f64(eps.0),
        }
    }

    /// The next first and second moment for a gradient, and by how much the parameter falls.
    pub(crate) fn next(&self, m: T, v: T, g: T) -> (T, T, T) {
        let m = m + self.weight1 * (g - m);
        let v = self.beta2 * v + self.weight2 * g * g;
        (m, v, self.rate * m / (v.sqrt() / self.root + self.eps))
    }
}

impl AdamW {
    /// Range of both decay rates.
    pub const BETA: RealRange = RealRange::Fraction;
    /// Range of `eps`.
    pub const EPS: RealRange = RealRange::Positive;
    /// Range of the weight decay.
    pub const WEIGHT_DECAY: RealRange = RealRange::NotNegative;
}

impl OpDef for AdamW {
    const ORIGINS: &'static [Origin] = &[Origin::Update];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        infer_adam(inputs, self.compute, &self.amax)
    }

    fn numbers(&self) -> Numbers {
        adam_numbers([self.beta1, self.beta2, self.eps, self.weight_decay])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        adam_factors(inputs, results, &self.amax)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let step = AdamStep::new([self.beta1, self.beta2, self.eps], inputs);
        let keep = T::from_f64(1.0 - inputs[5].data[0].to_f64() * self.weight_decay.0);
        let (results, amaxes) = self.amax.split(results);
        let (states, compute) = results.split_at_mut(3);
        let [p, m, v] = states else { unreachable!("three results") };
        let (p0, m0, v0, g) = (inputs[0].data, inputs[1].data, inputs[2].data, inputs[3].data);
        for i in 0..p0.len() {
            let fall;
            (m.data[i], v.data[i], fall) = step.next(m0[i], v0[i], g[i] * step.scale);
            p.data[i] = p0[i] * keep - fall;
        }
        if let Some(compute) = compute.first_mut() {
            compute.data.copy_from_slice(p.data);
        }
        self.amax.reference(results, amaxes);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 1), (2, 2)]
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(AdamW { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        adam_samples(|compute, amax| AdamW {
            beta1: 0.9.into(),
            beta2: 0.95.into(),
            eps: 1e-8.into(),
            weight_decay: 0.1.into(),
            compute,
            amax,
        })
    }
}

/// Samples of one of the Adams, which `op` makes of the type for computing and the amaxes.
pub(crate) fn adam_samples<O: OpDef>(op: impl Fn(Option<DType>, Amaxes) -> O) -> Vec<Sample> {
    let amaxes = |pieces| Amaxes { of: vec![0], pieces };
    let bf16 = Some(DType::Bf16);
    vec![
        adam_sample(op(None, Amaxes::default()), &[4, 6]),
        adam_sample(op(None, Amaxes::default()), &[5]),
        adam_sample(op(bf16, Amaxes::default()), &[4, 6]),
        adam_sample(op(bf16, amaxes(vec![])), &[4, 6]),
        adam_sample(op(None, amaxes(vec![(0, 2), (1, 3)])), &[4, 6]),
    ]
}

fn adam_sample(op: impl OpDef, shape: &[u64]) -> Sample {
    (4..7).fold(
        Sample::floats(op, &[shape, shape, shape, shape, &[], &[], &[]]).fill(2, Values::Positive),
        |sample, i| sample.fill(i, Values::Positive),
    )
}
