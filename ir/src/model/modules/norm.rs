//! `LayerNorm` and `RmsNorm`, as modules and as the norm inside others.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use super::{Common, ModuleDef};
use crate::Value;
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::params::ParamSpec;
use crate::model::range::Fields;
use crate::ops::{self, Number};

module! {
    /// Each token minus its mean, over its deviation, times a weight, plus a bias.
    pub struct LayerNorm {
        /// Added to the variance.
        #[serde(default = "default_eps")]
        pub eps: f64,
        /// The weight is stored minus one.
        #[serde(default)]
        pub zero_centered: bool,
    }
}

module! {
    /// Each token over its root mean square, times a weight.
    pub struct RmsNorm {
        /// Added to the mean square.
        #[serde(default = "default_eps")]
        pub eps: f64,
        /// The weight is stored minus one.
        #[serde(default)]
        pub zero_centered: bool,
    }
}

/// The norm inside another module.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Norm {
    /// See [`LayerNorm`].
    LayerNorm {
        /// Added to the variance.
        #[serde(default = "default_eps")]
        eps: f64,
        /// The weight is stored minus one.
        #[serde(default)]
        zero_centered: bool,
    },
    /// See [`RmsNorm`].
    RmsNorm {
        /// Added to the mean square.
        #[serde(default = "default_eps")]
        eps: f64,
        /// The weight is stored minus one.
        #[serde(default)]
        zero_centered: bool,
    },
}

pub(super) fn default_eps() -> f64 {
    1e-5
}

impl Default for Norm {
    fn default() -> Norm {
        Norm::LayerNorm { eps: default_eps(), zero_centered: false }
    }
}

impl Norm {
    /// Checks its numbers, as those of `field`.
    pub(super) fn check(self, fields: &Fields, field: &str) -> Result<(), ModelError> {
        let (eps, range) = match self {
            Norm::LayerNorm { eps, .. } => (eps, ops::LayerNorm::EPS),
            Norm::RmsNorm { eps, .. } => (eps, ops::RmsNorm::EPS),
        };
        fields.real(&format!("{field}.eps"), eps, range)
    }

    /// Normalizes `x` with parameters of the module at hand; the result has the module's name.
    pub(super) fn apply(self, cx: &mut Cx<'_>, x: Value) -> Result<Value, ModelError> {
        let width = [cx.width(x)];
        let ones = |zero_centered| if zero_centered { Init::Zeros } else { Init::Ones };
        match self {
            Norm::LayerNorm { eps, zero_centered } => {
                let weight = cx.param(ParamSpec::new("weight", &width, ones(zero_centered)))?;
                let bias = cx.param(ParamSpec::new("bias", &width, Init::Zeros))?;
                let eps = Number(eps);
                let op = ops::LayerNorm { eps, zero_centered, ..ops::LayerNorm::default() };
                Ok(cx.ops(&["", "mean", "rstd"], op, &[x, weight, bias])?[0])
            }
            Norm::RmsNorm { eps, zero_centered } => {
                let weight = cx.param(ParamSpec::new("weight", &width, ones(zero_centered)))?;
                let eps = Number(eps);
                let op = ops::RmsNorm { eps, zero_centered, ..ops::RmsNorm::default() };
                Ok(cx.ops(&["", "rstd"], op, &[x, weight])?[0])
            }
        }
    }
}

impl ModuleDef for LayerNorm {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.real("eps", self.eps, ops::LayerNorm::EPS)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let norm = Norm::LayerNorm { eps: self.eps, zero_centered: self.zero_centered };
        Ok(smallvec![norm.apply(cx, x)?])
    }
}

impl ModuleDef for RmsNorm {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.real("eps", self.eps, ops::RmsNorm::EPS)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let norm = Norm::RmsNorm { eps: self.eps, zero_centered: self.zero_centered };
        Ok(smallvec![norm.apply(cx, x)?])
    }
}
