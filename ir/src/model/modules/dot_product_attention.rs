//! `DotProductAttention`: attention of queries over keys and values, which a layer before it made.

use smallvec::smallvec;

use super::{Common, ModuleDef, yes};
use crate::Value;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::range::Fields;
use crate::ops::{Attention, Number};

module! {
    /// See the [module docs](self).
    pub struct DotProductAttention {
        /// Query heads. Fewer key-value heads, if keys are narrower.
        pub heads: u64,
        /// Queries do not see later keys.
        #[serde(default = "yes")]
        pub causal: bool,
        /// Factor of the scores; one over the root of the head's size by default.
        #[serde(default)]
        pub scale: Option<f64>,
    }
}

impl ModuleDef for DotProductAttention {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.size("heads", self.heads)?;
        self.scale.map_or(Ok(()), |it| fields.real("scale", it, Attention::SCALE))
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let [q, k, v]: [Value; 3] = cx.exactly(&inputs, "3 tensors: queries, keys and values")?;
        let width = cx.width(q);
        if self.heads == 0 || !width.is_multiple_of(self.heads) {
            let (field, found) = ("heads".to_string(), self.heads.to_string());
            let expected = format!("a divisor of the {width} features of the queries");
            return Err(cx.error("heads", Problem::Range { field, found, expected }));
        }
        cx.check_tp("heads", "the number of query heads", self.heads)?;
        let head_dim = width / self.heads;
        if cx.width(k).is_multiple_of(head_dim) {
            cx.check_tp("heads", "the number of KV heads", cx.width(k) / head_dim)?;
        }
        let o = attend(
            cx,
            "core",
            Core { head_dim, causal: self.causal, scale: self.scale },
            [q, k, v],
        )?;
        Ok(smallvec![o])
    }
}

/// Attributes of an attention.
pub(super) struct Core {
    pub head_dim: u64,
    pub causal: bool,
    pub scale: Option<f64>,
}

/// Applies attention; its result is called `name`.
pub(super) fn attend(
    cx: &mut Cx<'_>,
    name: &str,
    core: Core,
    qkv: [Value; 3],
) -> Result<Value, ModelError> {
    let Core { head_dim, causal, scale } = core;
    let op = Attention { head_dim, causal, scale: scale.map(Number) };
    Ok(cx.ops(&[name, &format!("{name}.lse")], op, &qkv)?[0])
}
