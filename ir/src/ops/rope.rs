//! `rope`: rotary position embedding of `x[* s (h d)]`: pairs of features of each head turn by an
//! angle that grows with the position.
//!
//! ```text
//! angle(p, i) = p * theta^(-2 i / d)             p = 0 .. s in every sequence, i = 0 .. d / 2
//! rotate_half (Hugging Face)                      features i and i + d/2 are a pair
//! interleaved (Meta, GPT-J)                       features 2 i and 2 i + 1 are a pair
//! (a, b) -> (a cos - b sin, b cos + a sin)        the gradient turns back: `inverse`
//! ```

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    BoundAt, Bounds, Factors, GradCx, GradError, Grads, Linear, LocalCx, Number, Numbers, OpDef,
    Real, Sample, TypeError, Types, View, ViewMut, arity, floats, is_default, ndim_at_least,
};
use crate::range::{Ranged, RealRange};
use crate::types::TensorType;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rope {
    /// Features of one head; even.
    pub head_dim: u64,
    /// Base of the angles.
    pub theta: Number,
    /// Which features are a pair.
    #[serde(default, skip_serializing_if = "is_default")]
    pub interleaved: bool,
    /// Slows down the low frequencies for a longer context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Llama3Scaling>,
    /// Turns back.
    #[serde(default, skip_serializing_if = "is_default")]
    pub inverse: bool,
}

/// Llama 3's scaling of frequencies (`rope_type: llama3` in Hugging Face).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Llama3Scaling {
    /// By how much low frequencies are divided.
    pub factor: Number,
    /// Wavelengths over `original / low_freq_factor` are divided.
    pub low_freq_factor: Number,
    /// Wavelengths under `original / high_freq_factor` are kept; between the two, interpolated.
    pub high_freq_factor: Number,
    /// The context length of the original training.
    pub original_max_position_embeddings: u64,
}

impl Llama3Scaling {
    /// The real numbers, each with the range that it must be in.
    pub fn numbers(&self) -> [Ranged; 3] {
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        let above_low = RealRange::Above { name: "low_freq_factor", bound: low.0 };
        [
            Ranged::new("factor", self.factor, RealRange::Positive),
            Ranged::new("low_freq_factor", low, RealRange::Positive),
            Ranged::new("high_freq_factor", high, above_low),
        ]
    }

    /// The frequency that takes the place of `freq`.
    pub fn scale(&self, freq: f64) -> f64 {
        let (low, high) = (self.low_freq_factor.0, self.high_freq_factor.0);
        let turns = self.original_max_position_embeddings as f64 * freq / std::f64::consts::TAU;
        let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 - smooth) * freq / self.factor.0 + smooth * freq
    }
}

impl Rope {
    /// Range of `theta`.
    pub const THETA: RealRange = RealRange::Positive;

    /// Radians per position of pair `i`.
    pub fn frequency(&self, i: usize) -> f64 {
        let freq = self.theta.0.powf(-2.0 * i as f64 / self.head_dim as f64);
        self.scaling.as_ref().map_or(freq, |it| it.scale(freq))
    }
}

impl OpDef for Rope {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 1)?;
        floats(inputs, 0)?;
        ndim_at_least(inputs, 0, 2, "at least 2 dims")?;
        let context = self.scaling.as_ref().map(|it| it.original_max_position_embeddings);
        if context == Some(0) {
            let why = "original_max_position_embeddings must be at least 1";
            return Err(TypeError::Attribute { why });
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(TypeError::Attribute { why: "head_dim must be even and not 0" });
        }
        let size = inputs[0].shape[inputs[0].ndim() - 1];
        match size.is_multiple_of(self.head_dim) {
            true => Ok(smallvec![inputs[0].clone()]),
            false => Err(TypeError::Multiple { what: "features", size, of: self.head_dim }),
        }
    }

    fn numbers(&self) -> Numbers {
        let theta = Ranged::new("theta", self.theta, Rope::THETA);
        std::iter::once(theta).chain(self.scaling.iter().flat_map(Llama3Scaling::numbers)).collect()
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let sizes = [('d', self.head_dim)];
        Factors::with_sizes("* s (h d) -> * s (h d)", &sizes, inputs, results)
            .whole("d")
            .linear(Linear::Joint)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    ) {
        let x = inputs[0];
        let (d, half) = (self.head_dim as usize, self.head_dim as usize / 2);
        let (s, n) = (x.shape[x.shape.len() - 2], x.last());
        let (first, second, step) = if self.interleaved { (0, 1, 2) } else { (0, half, 1) };
        let sign = if self.inverse { -1.0 } else { 1.0 };
        let freqs: Vec<f64> = (0..half).map(|it| self.frequency(it)).collect();
        let turns: Vec<(T, T)> = (0..s)
            .flat_map(|row| {
                let position = (cx.bounds[0].start + row as u64) as f64;
                freqs.iter().map(move |freq| {
                    let (sin, cos) = (position * freq).sin_cos();
                    (T::from_f64(cos), T::from_f64(sign * sin))
                })
            })
            .collect();
        let rows = results[0].data.chunks_exact_mut(n.max(1)).zip(x.data.chunks_exact(n.max(1)));
        for (i, (out, x)) in rows.enumerate() {
            let turns = &turns[i % s * half..][..half];
            for (out, x) in out.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                for (i, &(cos, sin)) in turns.iter().enumerate() {
                    let (at, to) = (first + step * i, second + step * i);
                    let (a, b) = (x[at], x[to]);
                    out[at] = a * cos - b * sin;
                    out[to] = b * cos + a * sin;
                }
            }
        }
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        let grad = cx.grad(0);
        let op = Rope { inverse: !self.inverse, ..self.clone() };
        Ok(smallvec![cx.op(0, op, &[grad])?])
    }

    fn bounds(&self, inputs: &[&TensorType]) -> Bounds {
        smallvec![BoundAt::Input(0, inputs[0].ndim() - 2)]
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn samples() -> Vec<Sample> {
        let op = Rope {
            head_dim: 4,
            theta: 100.0.into(),
            interleaved: false,
            scaling: None,
            inverse: false,
        };
        let scaling = Llama3Scaling {
            factor: 8.0.into(),
            low_freq_factor: 1.0.into(),
            high_freq_factor: 4.0.into(),
            original_max_position_embeddings: 64,
        };
        let scaled = Rope { interleaved: true, scaling: Some(scaling), ..op.clone() };
        vec![
            Sample::floats(op.clone(), &[&[2, 4, 8]]),
            Sample::floats(scaled, &[&[2, 5, 8]]),
            Sample::floats(Rope { inverse: true, ..op }, &[&[3, 12]]),
        ]
    }
}
