//! `sgd`: one step of gradient descent, with or without momentum, in PyTorch's arithmetic.
//!
//! ```text
//! g = g * scale + weight_decay * p
//! buf = momentum * buf + g                  p -= lr * buf, or lr * g without momentum
//! ```
//!
//! The buffer starts as zero, so that it is the first gradient after the first update, as in PyTorch. Where `applied`
//! is not 1, nothing changes.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::checkpoint::Optimizer;
use crate::ops::adam::is_applied;
use crate::ops::{
    Factors, LocalCx, Number, Numbers, OpDef, Origin, Real, Sample, Trains, TypeError, Types,
    Values, View, ViewMut, arity, is_default, number, same_shape,
};
use crate::range::{Ranged, RealRange};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `p`, `buf` if there is momentum, `g`, `scale`, `lr`,
/// `applied`; results: `p`, and `buf` if there is momentum.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Sgd {
    /// Decay rate of the momentum buffer; none is kept at 0.
    #[serde(skip_serializing_if = "is_default")]
    pub momentum: Number,
    /// Decay, as a gradient.
    #[serde(skip_serializing_if = "is_default")]
    pub weight_decay: Number,
}

impl Sgd {
    /// Range of the momentum.
    pub const MOMENTUM: RealRange = RealRange::Fraction;
    /// Range of the weight decay.
    pub const WEIGHT_DECAY: RealRange = RealRange::NotNegative;

    /// How many tensors an update changes: the parameter, and the buffer if there is one.
    fn n_states(&self) -> usize {
        if self.momentum.0 == 0.0 { 1 } else { 2 }
    }
}

impl OpDef for Sgd {
    const ORIGINS: &'static [Origin] = &[Origin::Update];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let n = self.n_states();
        arity(inputs, n + 4)?;
        for operand in &inputs[1..=n] {
            same_shape(inputs[0], operand)?;
        }
        for operand in n + 1..n + 4 {
            number(inputs, operand)?;
        }
        Ok(inputs[..n].iter().map(|&it| it.clone()).collect())
    }

    fn numbers(&self) -> Numbers {
        smallvec![
            Ranged::new("momentum", self.momentum, Sgd::MOMENTUM),
            Ranged::new("weight_decay", self.weight_decay, Sgd::WEIGHT_DECAY),
        ]
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let text = if self.n_states() == 1 { "*, *, , , -> *" } else { "*, *, *, , , -> *, *" };
        Factors::new(text, inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let n = self.n_states();
        let [scale, lr] = [1, 2].map(|it| inputs[n + it].data[0]);
        let applied = is_applied(inputs);
        let (momentum, decay) = (T::from_f64(self.momentum.0), T::from_f64(self.weight_decay.0));
        let (p0, g) = (inputs[0].data, inputs[n].data);
        for i in 0..p0.len() {
            if !applied {
                (0..n).for_each(|it| results[it].data[i] = inputs[it].data[i]);
                continue;
            }
            let mut fall = g[i] * scale + decay * p0[i];
            if n == 2 {
                fall = momentum * inputs[1].data[i] + fall;
                results[1].data[i] = fall;
            }
            results[0].data[i] = p0[i] - lr * fall;
        }
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.n_states() == 1 { &[(0, 0)] } else { &[(0, 0), (1, 1)] }
    }

    fn trains(&self) -> Option<Trains> {
        let (momentum, weight_decay) = (self.momentum.0, self.weight_decay.0);
        let states: &[_] = if self.n_states() == 1 { &[] } else { &["momentum_buffer"] };
        Some(Trains { optimizer: Optimizer::Sgd { momentum, weight_decay }, states })
    }

    fn batches_with(&self, other: &Self) -> bool {
        *self == Sgd { weight_decay: self.weight_decay, ..other.clone() }
    }

    fn samples() -> Vec<Sample> {
        let plain = Sgd::default();
        let heavy = Sgd { momentum: 0.9.into(), weight_decay: 0.1.into() };
        let numbers = |sample: Sample, from: usize, applied: Values| {
            let sample = (from..from + 2).fold(sample, |it, i| it.fill(i, Values::Positive));
            sample.fill(from + 2, applied)
        };
        let small = Sample::floats(plain, &[&[4, 6], &[4, 6], &[], &[], &[]]);
        let large = Sample::floats(heavy, &[&[5], &[5], &[5], &[], &[], &[]]);
        vec![
            numbers(small, 2, Values::One),
            numbers(large.clone(), 3, Values::One),
            numbers(large, 3, Values::Zero),
        ]
    }
}
