//! `Activation`: a nonlinear function; gated ones read a gate and a value.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use super::{Common, ModuleDef};
use crate::Value;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::range::Fields;
use crate::ops::{self, activation::ActivationKind, glu::GluKind};

module! {
    /// See the [module docs](self).
    pub struct Activation {
        /// The function.
        pub kind: Function,
    }
}

/// Activation functions, with TransformerEngine's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Function {
    /// Gaussian error linear unit.
    Gelu,
    /// The same, approximated by a tanh: GPT-2's `gelu_new`.
    GeluTanh,
    /// Rectified linear unit.
    Relu,
    /// Sigmoid linear unit.
    Silu,
    /// Squared rectified linear unit.
    Srelu,
    /// `silu(gate) * up`.
    Swiglu,
    /// `gelu(gate) * up`.
    Geglu,
    /// `gelu_tanh(gate) * up`.
    GegluTanh,
    /// `relu(gate) * up`.
    Reglu,
}

/// A function of one tensor, or of two.
enum Shape {
    Plain(ActivationKind),
    Gated(GluKind),
}

impl Function {
    fn shape(self) -> Shape {
        match self {
            Function::Gelu => Shape::Plain(ActivationKind::Gelu),
            Function::GeluTanh => Shape::Plain(ActivationKind::GeluTanh),
            Function::Relu => Shape::Plain(ActivationKind::Relu),
            Function::Silu => Shape::Plain(ActivationKind::Silu),
            Function::Srelu => Shape::Plain(ActivationKind::Srelu),
            Function::Swiglu => Shape::Gated(GluKind::Swiglu),
            Function::Geglu => Shape::Gated(GluKind::Geglu),
            Function::GegluTanh => Shape::Gated(GluKind::GegluTanh),
            Function::Reglu => Shape::Gated(GluKind::Reglu),
        }
    }

    /// Whether it reads a gate besides the value.
    pub fn is_gated(self) -> bool {
        matches!(self.shape(), Shape::Gated(_))
    }

    /// Applies it; the gate comes first.
    pub(super) fn apply(
        self,
        cx: &mut Cx<'_>,
        name: &str,
        inputs: &Values,
    ) -> Result<Value, ModelError> {
        match self.shape() {
            Shape::Plain(kind) => {
                let x = cx.one(inputs)?;
                cx.op(name, ops::Activation::new(kind), &[x])
            }
            Shape::Gated(kind) => {
                let operands: [Value; 2] = cx.exactly(inputs, "2 tensors, the gate first")?;
                cx.op(name, ops::Glu::new(kind), &operands)
            }
        }
    }
}

impl ModuleDef for Activation {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, _fields: &Fields) -> Result<(), ModelError> {
        Ok(())
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let name = if self.name.is_empty() { "act" } else { "" };
        Ok(smallvec![self.kind.apply(cx, name, &inputs)?])
    }
}
