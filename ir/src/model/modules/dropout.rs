//! `Dropout`: elements are zero with probability `rate`, the others scaled up; the same on any mesh.

use smallvec::smallvec;

use super::{Common, ModuleDef};
use crate::Value;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::ModelError;
use crate::model::range::Fields;
use crate::ops::{self, Number};
use crate::random::stream_key;

module! {
    /// See the [module docs](self).
    pub struct Dropout {
        /// The probability that an element is dropped.
        pub rate: f64,
    }
}

impl ModuleDef for Dropout {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.real("rate", self.rate, ops::Dropout::RATE)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        Ok(smallvec![dropout(cx, "dropout", x, self.rate)?])
    }
}

/// Applies dropout, unless `rate` is 0.
pub(super) fn dropout(
    cx: &mut Cx<'_>,
    name: &str,
    x: Value,
    rate: f64,
) -> Result<Value, ModelError> {
    if rate == 0.0 {
        return Ok(x);
    }
    let seed = cx.seed();
    // The key follows the value's unique name, so that two of them never drop alike.
    let unique = cx.name(name);
    let unique = cx.builder.unique(&unique);
    let op = ops::Dropout { rate: Number(rate), key: stream_key(&unique) };
    cx.op(name, op, &[x, seed])
}
