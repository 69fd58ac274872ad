//! `adam` and `adamw`: one step of Adam, in PyTorch's arithmetic. Weight decay is a part of the gradient in `adam`, and
//! decoupled from it in `adamw`.
//!
//! ```text
//! adam     g = g * scale + weight_decay * p
//! adamw    g *= scale      p *= 1 - lr * weight_decay
//!
//! t += 1
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
    Amaxes, Factors, LocalCx, Number, Numbers, Op, OpDef, Origin, Real, Sample, Trains, TypeError,
    Types, Values, View, ViewMut, arity, is_default, number, same_shape,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `p`, `m`, `v`, `t`, `g`, `scale`, `lr`, `applied`; results: `p`,
/// `m`, `v`, `t`, and `p` in the type `compute` if there is one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AdamStep<const DECOUPLED: bool> {
    /// Decay rate of the first moment.
    pub beta1: Number,
    /// Decay rate of the second moment.
    pub beta2: Number,
    /// Added to the root of the second moment; not 0, or padding would not stay zero.
    pub eps: Number,
    /// Decay of the weight.
    #[serde(default, skip_serializing_if = "is_default")]
    pub weight_decay: Number,
    /// Also returns the new `p` in this type, for what computes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<DType>,
    /// Also returns the amax of the new `p`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
}

/// A step of Adam whose weight decay is a part of the gradient.
pub type Adam = AdamStep<false>;

impl<const DECOUPLED: bool> AdamStep<DECOUPLED> {
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

/// Returns true if an optimizer's last operand, `applied`, says that its update counts.
pub(crate) fn is_applied<T: Real>(inputs: &[View<'_, T>]) -> bool {
    inputs[inputs.len() - 1].data[0].to_f64() == 1.0
}

impl<const DECOUPLED: bool> OpDef for AdamStep<DECOUPLED>
where
    AdamStep<DECOUPLED>: Into<Op>,
{
    const ORIGINS: &'static [Origin] = &[Origin::Update];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 8)?;
        for operand in [1, 2, 4] {
            same_shape(inputs[0], inputs[operand])?;
        }
        for operand in [3, 5, 6, 7] {
            number(inputs, operand)?;
        }
        let compute = self.compute.map(|it| inputs[0].with_dtype(it));
        let states = inputs[..Self::STATES].iter().map(|&it| it.clone());
        self.amax.infer(states.chain(compute).collect())
    }

    fn numbers(&self) -> Numbers {
        smallvec![
            Ranged::new("beta1", self.beta1, Self::BETA),
            Ranged::new("beta2", self.beta2, Self::BETA),
            Ranged::new("eps", self.eps, Self::EPS),
            Ranged::new("weight_decay", self.weight_decay, Self::WEIGHT_DECAY),
        ]
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let own = self.amax.own(results);
        let text = match self.compute {
            None => "*, *, *, , *, , , -> *, *, *, ",
            Some(_) => "*, *, *, , *, , , -> *, *, *, , *",
        };
        // Every rank counts the updates of a parameter, whatever it holds of it.
        self.amax.factors(Factors::new(text, inputs, own).alike(3))
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (results, amaxes) = self.amax.split(results);
        let (states, compute) = results.split_at_mut(Self::STATES);
        let [p, m, v, t] = states else { unreachable!("an Adam has four states") };
        let [p0, m0, v0, t0, g] = [0, 1, 2, 3, 4].map(|it| inputs[it].data);
        let number = |i: usize| inputs[i].data[0].to_f64();
        let (step, scale, lr) = (number(3) + 1.0, T::from_f64(number(5)), number(6));
        let (beta1, beta2) = (self.beta1.0, self.beta2.0);
        let [weight1, weight2] = [beta1, beta2].map(|it| T::from_f64(1.0 - it));
        let (beta2_t, eps) = (T::from_f64(beta2), T::from_f64(self.eps.0));
        let rate = T::from_f64(lr / (1.0 - beta1.powf(step)));
        let root = T::from_f64((1.0 - beta2.powf(step)).sqrt());
        let decay = T::from_f64(self.weight_decay.0);
        let keep = T::from_f64(1.0 - lr * self.weight_decay.0);
        if is_applied(inputs) {
            t.data[0] = t0[0] + T::from_f64(1.0);
            for i in 0..p0.len() {
                let (p0, g) = match DECOUPLED {
                    true => (p0[i] * keep, g[i] * scale),
                    false => (p0[i], g[i] * scale + decay * p0[i]),
                };
                m.data[i] = m0[i] + weight1 * (g - m0[i]);
                v.data[i] = beta2_t * v0[i] + weight2 * g * g;
                p.data[i] = p0 - rate * m.data[i] / (v.data[i].sqrt() / root + eps);
            }
        } else {
            for (new, old) in states.iter_mut().zip(inputs) {
                new.data.copy_from_slice(old.data);
            }
        }
        if let Some(compute) = compute.first_mut() {
            compute.data.copy_from_slice(states[0].data);
        }
        self.amax.reference(results, amaxes);
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0), (1, 1), (2, 2), (3, 3)]
    }

    fn localize(&self, results: &[&[u64]]) -> Option<Op> {
        let amax = self.amax.localize(results)?;
        Some(AdamStep { amax, ..self.clone() }.into())
    }

    fn trains(&self) -> Option<Trains> {
        let optimizer = Optimizer::Adam {
            decoupled: DECOUPLED,
            betas: (self.beta1.0, self.beta2.0),
            eps: self.eps.0,
            weight_decay: self.weight_decay.0,
        };
        Some(Trains { optimizer, states: &["exp_avg", "exp_avg_sq", "step"] })
    }

    fn batches_with(&self, other: &Self) -> bool {
        *self == AdamStep { weight_decay: self.weight_decay, ..other.clone() }
    }

    fn casts_to(&self) -> Option<DType> {
        self.compute
    }

    fn samples() -> Vec<Sample> {
        let sample = |compute, amax, shape: &[u64]| {
            let (beta1, beta2, eps) = (0.9.into(), 0.95.into(), 1e-8.into());
            let op = Self { beta1, beta2, eps, weight_decay: 0.1.into(), compute, amax };
            let shapes = [shape, shape, shape, &[], shape, &[], &[], &[]];
            [2, 3, 5, 6]
                .into_iter()
                .fold(Sample::floats(op, &shapes), |it, i| it.fill(i, Values::Positive))
                .fill(7, Values::One)
        };
        let amaxes = |pieces| Amaxes { of: vec![0], pieces };
        let bf16 = Some(DType::Bf16);
        vec![
            sample(None, Amaxes::default(), &[4, 6]),
            sample(None, Amaxes::default(), &[5]),
            sample(bf16, Amaxes::default(), &[4, 6]),
            sample(bf16, amaxes(vec![]), &[4, 6]),
            sample(None, amaxes(vec![(0, 2), (1, 3)]), &[4, 6]),
            sample(bf16, amaxes(vec![]), &[4, 6]).fill(7, Values::Zero),
        ]
    }
}
