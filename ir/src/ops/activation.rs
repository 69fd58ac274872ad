//! `activation`: a nonlinear function of every element.
//!
//! ```text
//! gelu       x * P(N <= x), exactly           gelu_tanh   its usual approximation by a tanh
//! relu       max(x, 0)                        srelu       max(x, 0)^2
//! silu       x / (1 + exp(-x))
//! ```
//!
//! All are zero at zero, so padding stays zero.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    ActivationGrad, Factors, GradCx, GradError, Grads, LocalCx, OpDef, Real, Sample, TypeError,
    Types, View, ViewMut, arity, floats,
};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Activation {
    /// The function.
    pub kind: ActivationKind,
}

/// Which function. See the [module docs](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// Gaussian error linear unit.
    Gelu,
    /// The same, approximated by a tanh.
    GeluTanh,
    /// Rectified linear unit.
    Relu,
    /// Sigmoid linear unit.
    Silu,
    /// Squared rectified linear unit.
    Srelu,
}

/// Slope of the tanh's argument in `gelu_tanh` at zero: `sqrt(2 / pi)`.
const GELU_SLOPE: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
/// Factor of the cube in it.
const GELU_CUBE: f64 = 0.044715;

impl ActivationKind {
    /// All of them.
    pub const ALL: [ActivationKind; 5] = [
        ActivationKind::Gelu,
        ActivationKind::GeluTanh,
        ActivationKind::Relu,
        ActivationKind::Silu,
        ActivationKind::Srelu,
    ];

    /// The function.
    pub fn apply<T: Real>(self, x: T) -> T {
        match self {
            ActivationKind::Gelu => x * normal_cdf(x),
            ActivationKind::GeluTanh => {
                let half = T::from_f64(0.5);
                half * x * (T::one() + gelu_argument(x).tanh())
            }
            ActivationKind::Relu => x.max(T::zero()),
            ActivationKind::Silu => x * sigmoid(x),
            ActivationKind::Srelu => x.max(T::zero()) * x.max(T::zero()),
        }
    }

    /// Its derivative; that of `relu` is 0 at 0, as in PyTorch.
    pub fn slope<T: Real>(self, x: T) -> T {
        let one = T::one();
        match self {
            ActivationKind::Gelu => {
                let density =
                    T::from_f64((-0.5 * x.to_f64() * x.to_f64()).exp() * 0.5 * GELU_SLOPE);
                normal_cdf(x) + x * density
            }
            ActivationKind::GeluTanh => {
                let half = T::from_f64(0.5);
                let tanh = gelu_argument(x).tanh();
                let slope = T::from_f64(GELU_SLOPE) * (one + T::from_f64(3.0 * GELU_CUBE) * x * x);
                half * (one + tanh) + half * x * (one - tanh * tanh) * slope
            }
            ActivationKind::Relu if x > T::zero() => one,
            ActivationKind::Relu => T::zero(),
            ActivationKind::Silu => {
                let sigmoid = sigmoid(x);
                sigmoid * (one + x * (one - sigmoid))
            }
            ActivationKind::Srelu => T::from_f64(2.0) * x.max(T::zero()),
        }
    }
}

fn sigmoid<T: Real>(x: T) -> T {
    T::one() / (T::one() + (-x).exp())
}

fn gelu_argument<T: Real>(x: T) -> T {
    T::from_f64(GELU_SLOPE) * (x + T::from_f64(GELU_CUBE) * x * x * x)
}

/// `P(N <= x)` for a standard normal `N`.
fn normal_cdf<T: Real>(x: T) -> T {
    T::from_f64(0.5 * libm::erfc(-x.to_f64() * std::f64::consts::FRAC_1_SQRT_2))
}

impl Activation {
    /// The op of a function.
    pub fn new(kind: ActivationKind) -> Activation {
        Activation { kind }
    }
}

impl OpDef for Activation {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        Ok(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("* -> *", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        for (out, &x) in results[0].data.iter_mut().zip(inputs[0].data) {
            *out = self.kind.apply(x);
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let (x, grad) = (cx.inputs[0], cx.grad(0));
        Ok(smallvec![cx.op(0, ActivationGrad::new(self.kind), &[grad, x])?])
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn is_map(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        let sample = |kind| Sample::floats(Activation::new(kind), &[&[4, 5]]);
        ActivationKind::ALL.map(sample).to_vec()
    }
}
