//! `Rope`: rotary position embedding, in both conventions and with Llama 3's scaling.
//!
//! As a module it turns the first two of the tensors that it gets (queries and keys) and passes the
//! others on; inside an attention it needs no `head_dim`.

use serde::{Deserialize, Serialize};

use super::{Common, ModuleDef};
use crate::Value;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::range::Fields;
use crate::ops::rope::Llama3Scaling;
use crate::ops::{self, Number};

module! {
    /// See the [module docs](self).
    pub struct Rope {
        /// Features of a head.
        #[serde(default)]
        pub head_dim: Option<u64>,
        /// Base of the angles.
        #[serde(default = "default_theta")]
        pub theta: f64,
        /// Neighbouring features are a pair (Meta, GPT-J), not those half a head apart (Hugging Face).
        #[serde(default)]
        pub interleaved: bool,
        /// Slows down low frequencies for a longer context.
        #[serde(default)]
        pub scaling: Option<Scaling>,
    }
}

fn default_theta() -> f64 {
    10000.0
}

/// How frequencies are changed for a longer context.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Scaling {
    /// `rope_type: llama3` in Hugging Face's configurations.
    Llama3 {
        /// By how much low frequencies are divided.
        #[serde(default = "default_factor")]
        factor: f64,
        /// Wavelengths over `original / low_freq_factor` are divided.
        #[serde(default = "default_low")]
        low_freq_factor: f64,
        /// Wavelengths under `original / high_freq_factor` are kept.
        #[serde(default = "default_high")]
        high_freq_factor: f64,
        /// The context length of the original training.
        #[serde(default = "default_original")]
        original_max_position_embeddings: u64,
    },
}

fn default_factor() -> f64 {
    8.0
}

fn default_low() -> f64 {
    1.0
}

fn default_high() -> f64 {
    4.0
}

fn default_original() -> u64 {
    8192
}

impl From<Scaling> for Llama3Scaling {
    fn from(it: Scaling) -> Llama3Scaling {
        let Scaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } = it;
        Llama3Scaling {
            factor: Number(factor),
            low_freq_factor: Number(low_freq_factor),
            high_freq_factor: Number(high_freq_factor),
            original_max_position_embeddings,
        }
    }
}

impl Rope {
    /// Checks it as part of an attention, which knows the size of a head.
    pub(super) fn check_part(&self, fields: &Fields) -> Result<(), ModelError> {
        let why = "the rope of an attention has what the attention has";
        fields.no_effect(&self.common_options().stated(), why)?;
        fields.no_effect(&[("head_dim", self.head_dim.is_some())], why)?;
        self.check(fields)
    }

    /// Turns the heads of one tensor.
    pub(super) fn turn(
        &self,
        cx: &mut Cx<'_>,
        name: &str,
        x: Value,
        head_dim: u64,
    ) -> Result<Value, ModelError> {
        let scaling = self.scaling.map(Llama3Scaling::from);
        let (theta, interleaved) = (Number(self.theta), self.interleaved);
        cx.op(name, ops::Rope { head_dim, theta, interleaved, scaling, inverse: false }, &[x])
    }
}

impl ModuleDef for Rope {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.optional_size("head_dim", self.head_dim)?;
        fields.real("theta", self.theta, ops::Rope::THETA)?;
        let Some(scaling) = self.scaling.map(Llama3Scaling::from) else { return Ok(()) };
        fields.numbers("scaling", &scaling.numbers())?;
        let context = scaling.original_max_position_embeddings;
        fields.size("scaling.original_max_position_embeddings", context)
    }

    fn build(&self, cx: &mut Cx<'_>, mut values: Values) -> Result<Values, ModelError> {
        let Some(head_dim) = self.head_dim else {
            let (owner, field) = (Some("Rope".to_string()), "head_dim".to_string());
            return Err(cx.error("", Problem::MissingField { owner, field }));
        };
        for (value, name) in values.iter_mut().zip(["q.rope", "k.rope"]) {
            *value = self.turn(cx, name, *value, head_dim)?;
        }
        Ok(values)
    }
}
