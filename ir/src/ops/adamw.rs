//! `adamw`: one step of Adam with decoupled weight decay, in PyTorch's arithmetic.
//!
//! ```text
//! g *= scale          p *= 1 - lr * weight_decay                      t += 1
//! m += (1 - beta1) * (g - m)                 v = beta2 * v + (1 - beta2) * g^2
//! p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```
//!
//! `t` counts the updates of this parameter, so that the correction of the moments' bias starts at its own
//! first update. Where `applied` is not 1, nothing changes.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::checkpoint::Optimizer;
use crate::ops::{
    Amaxes, Factors, LocalCx, Number, Numbers, OpDef, Origin, Real, Sample, Trains, TypeError,
    Types, Values, View, ViewMut, arity, is_default, number, same_shape,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `p`, `m`, `v`, `t`, `g`, `scale`, `lr`, `applied`; results: `p`,
/// `m`, `v`, `t`, and `p` in the type `compute` if there is one.
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

/// [`OpDef::trains`] of an Adam.
pub(crate) fn adam_trains(decoupled: bool, numbers: [Number; 4]) -> Option<Trains> {
    let [beta1, beta2, eps, weight_decay] = numbers.map(|it| it.0);
    let optimizer = Optimizer::Adam { decoupled, betas: (beta1, beta2), eps, weight_decay };
    Some(Trains { optimizer, states: &["exp_avg", "exp_avg_sq", "step"] })
}

/// Checks the operands of an Adam.
pub(crate) fn infer_adam(
    inputs: &[&TensorType],
    compute: Option<DType>,
    amax: &Amaxes,
) -> Result<Types, TypeError> {
    arity(inputs, 8)?;
    for operand in [1, 2, 4] {
        same_shape(inputs[0], inputs[operand])?;
    }
    for operand in [3, 5, 6, 7] {
        number(inputs, operand)?;
    }
    let compute = compute.map(|it| inputs[0].with_dtype(it));
    amax.infer(inputs[..AdamW::STATES].iter().map(|&it| it.clone()).chain(compute).collect())
}

/// [`OpDef::factors`] of an Adam.
pub(crate) fn adam_factors(
    inputs: &[&TensorType],
    results: &[&TensorType],
    amax: &Amaxes,
) -> Factors {
    let own = amax.own(results);
    let text = match own.len() {
        AdamW::STATES => "*, *, *, , *, , , -> *, *, *, ",
        _ => "*, *, *, , *, , , -> *, *, *, , *",
    };
    // Every rank counts the updates of a parameter, whatever it holds of it.
    amax.factors(Factors::new(text, inputs, own).alike(3))
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
    /// Computes the numbers from the attributes and the scalar operands of an Adam. Returns `None` if the update is
    /// not applied.
    pub(crate) fn new(
        [beta1, beta2, eps]: [Number; 3],
        inputs: &[View<'_, T>],
    ) -> Option<AdamStep<T>> {
        let number = |i: usize| inputs[i].data[0].to_f64();
        let (step, scale, lr) = (number(3) + 1.0, number(5), number(6));
        if !is_applied(inputs) {
            return None;
        }
        Some(AdamStep {
            scale: T::from_f64(scale),
            weight1: T::from_f64(1.0 - beta1.0),
            beta2: T::from_f64(beta2.0),
            weight2: T::from_f64(1.0 - beta2.0),
            rate: T::from_f64(lr / (1.0 - beta1.0.powf(step))),
            root: T::from_f64((1.0 - beta2.0.powf(step)).sqrt()),
            eps: T::from_f64(eps.0),
        })
    }

    /// The next first and second moment for a gradient, and by how much the parameter falls.
    pub(crate) fn next(&self, m: T, v: T, g: T) -> (T, T, T) {
        let m = m + self.weight1 * (g - m);
        let v = self.beta2 * v + self.weight2 * g * g;
        (m, v, self.rate * m / (v.sqrt() / self.root + self.eps))
    }
}

/// Returns true if an optimizer's last operand, `applied`, says that its update counts.
pub(crate) fn is_applied<T: Real>(inputs: &[View<'_, T>]) -> bool {
    inputs[inputs.len() - 1].data[0].to_f64() == 1.0
}

/// [`OpDef::reference`] of an Adam, of which `next` makes the new parameter, `m` and `v` from the step and an old
/// parameter, `m`, `v` and gradient.
pub(crate) fn adam_reference<T: Real>(
    numbers: [Number; 3],
    amax: &Amaxes,
    inputs: &[View<'_, T>],
    results: &mut [ViewMut<'_, T>],
    next: impl Fn(&AdamStep<T>, [T; 4]) -> [T; 3],
) {
    let (results, amaxes) = amax.split(results);
    let (states, compute) = results.split_at_mut(AdamW::STATES);
    let step = AdamStep::new(numbers, inputs);
    let [p, m, v, t] = states else { unreachable!("an Adam has four states") };
    let [p0, m0, v0, t0, g] = [0, 1, 2, 3, 4].map(|it| inputs[it].data);
    t.data[0] = if step.is_some() { t0[0] + T::from_f64(1.0) } else { t0[0] };
    for i in 0..p0.len() {
        [p.data[i], m.data[i], v.data[i]] = match &step {
            Some(step) => next(step, [p0[i], m0[i], v0[i], g[i]]),
            None => [p0[i], m0[i], v0[i]],
        };
    }
    if let Some(compute) = compute.first_mut() {
        compute.data.copy_from_slice(p.data);
    }
    amax.reference(results, amaxes);
}

impl AdamW {
    /// The number of operands that an Adam replaces: `p`, `m`, `v` and `t`. Its first results are the new ones, in
    /// this order.
    pub const STATES: usize = 4;
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
        let keep = T::from_f64(1.0 - inputs[6].data[0].to_f64() * self.weight_decay.0);
        let numbers = [self.beta1, self.beta2, self.eps];
        adam_reference(numbers, &self.amax, inputs, results, |step, [p, m, v, g]| {
            let (m, v, fall) = step.next(m, v, g * step.scale);
            [p * keep - fall, m, v]
        });
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 1), (2, 2), (3, 3)]
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(AdamW { amax, ..self.clone() }.into())
    }

    fn trains(&self) -> Option<Trains> {
        adam_trains(true, [self.beta1, self.beta2, self.eps, self.weight_decay])
    }

    fn batches_with(&self, other: &Self) -> bool {
        *self == AdamW { weight_decay: self.weight_decay, ..other.clone() }
    }

    fn casts_to(&self) -> Option<DType> {
        self.compute
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
    let skipped = |sample: Sample| sample.fill(7, Values::Zero);
    vec![
        adam_sample(op(None, Amaxes::default()), &[4, 6]),
        adam_sample(op(None, Amaxes::default()), &[5]),
        adam_sample(op(bf16, Amaxes::default()), &[4, 6]),
        adam_sample(op(bf16, amaxes(vec![])), &[4, 6]),
        adam_sample(op(None, amaxes(vec![(0, 2), (1, 3)])), &[4, 6]),
        skipped(adam_sample(op(bf16, amaxes(vec![])), &[4, 6])),
    ]
}

fn adam_sample(op: impl OpDef, shape: &[u64]) -> Sample {
    let shapes = [shape, shape, shape, &[], shape, &[], &[], &[]];
    [2, 3, 5, 6]
        .into_iter()
        .fold(Sample::floats(op, &shapes), |sample, i| sample.fill(i, Values::Positive))
        .fill(7, Values::One)
}
