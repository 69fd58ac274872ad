//! `Residual`: `x + body(x)`, with dropout of the body's result.

use smallvec::smallvec;

use super::dropout::dropout;
use super::{Attention, Common, Module, ModuleDef, attentions_in, layers_in};
use crate::Value;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::range::Fields;
use crate::ops::{Add, Dropout};

module! {
    /// See the [module docs](self).
    pub struct Residual {
        /// The modules; the last makes one tensor like the first one's input.
        pub body: Vec<Module>,
        /// Probability with which an element of the body's result is dropped.
        #[serde(default)]
        pub dropout: f64,
    }
}

impl ModuleDef for Residual {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.modules("body", &self.body)?;
        fields.real("dropout", self.dropout, Dropout::RATE)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        let branch = cx.chain("body", &self.body, smallvec![x])?;
        let branch = cx.one(&branch)?;
        Ok(smallvec![add(cx, "residual", x, branch, self.dropout)?])
    }

    fn n_layers(&self) -> u64 {
        layers_in(&self.body)
    }

    fn attentions(&self, path: &str, tp_mesh: Option<&str>, found: &mut Vec<Attention>) {
        attentions_in(&self.body, &format!("{path}.body"), tp_mesh, found);
    }
}

/// The residual stream plus what a branch adds to it.
pub(super) fn add(
    cx: &mut Cx<'_>,
    name: &str,
    stream: Value,
    branch: Value,
    rate: f64,
) -> Result<Value, ModelError> {
    let branch = dropout(cx, &format!("{name}.dropout"), branch, rate)?;
    let sum = cx.op(name, Add {}, &[stream, branch])?;
    cx.pin_stream(sum)?;
    Ok(sum)
}
