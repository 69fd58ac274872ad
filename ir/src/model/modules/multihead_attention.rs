//! `MultiheadAttention`: projections to queries, keys and values, attention, and a projection back.
//!
//! Where key-value heads are fewer than tensor-parallel coordinates, each is replicated over as many
//! of them as share its queries: keys and values are computed in layout `[tp_kv]` from weights that
//! are stored `[tp_kv.tp_rep]`, and the gradient is a sum over `tp_rep`.

use smallvec::smallvec;

use super::dot_product_attention::{Core, attend};
use super::linear::{Parallel, Projection};
use super::norm::Norm;
use super::rope::Rope;
use super::{Attention, Common, ModuleDef, yes};
use crate::Value;
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::params::Start;
use crate::model::range::{Fields, MAX_SIZE};
use crate::ops::{self, MergeDims, SplitDim};

module! {
    /// See the [module docs](self).
    pub struct MultiheadAttention {
        /// Query heads.
        pub heads: u64,
        /// Key-value heads; as many as query heads by default.
        #[serde(default)]
        pub kv_heads: Option<u64>,
        /// Features of a head; those of the input over `heads` by default.
        #[serde(default)]
        pub head_dim: Option<u64>,
        /// A norm before it; none by default, and that of the layer around in a `TransformerLayer`.
        #[serde(default)]
        pub norm: Option<Norm>,
        /// A norm of the queries and keys of each head.
        #[serde(default)]
        pub qk_norm: Option<Norm>,
        /// Rotary position embedding of queries and keys.
        #[serde(default)]
        pub rope: Option<Rope>,
        /// Queries do not see later keys.
        #[serde(default = "yes")]
        pub causal: bool,
        /// Factor of the scores; one over the root of `head_dim` by default.
        #[serde(default)]
        pub scale: Option<f64>,
        /// Projections have biases: as in the layer around, or yes.
        #[serde(default)]
        pub bias: Option<bool>,
        /// Bias of the projections to queries, keys and values, where it differs.
        #[serde(default)]
        pub qkv_bias: Option<bool>,
        /// How the first projections start; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// How the last projection starts; the model's `output_init` by default.
        #[serde(default)]
        pub output_init: Option<Init>,
    }
}

impl ModuleDef for MultiheadAttention {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.size("heads", self.heads)?;
        fields.optional_size("kv_heads", self.kv_heads)?;
        fields.optional_size("head_dim", self.head_dim)?;
        self.norm.map_or(Ok(()), |it| it.check(fields, "norm"))?;
        self.qk_norm.map_or(Ok(()), |it| it.check(fields, "qk_norm"))?;
        self.rope.as_ref().map_or(Ok(()), |it| it.check_part(&fields.of("rope")))?;
        self.scale.map_or(Ok(()), |it| fields.real("scale", it, ops::Attention::SCALE))?;
        fields.init("init", self.init)?;
        fields.init("output_init", self.output_init)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let mut x = cx.one(&inputs)?;
        if let Some(norm) = self.norm {
            x = cx.scoped_part("layer_norm", |cx| norm.apply(cx, x))?;
        }
        Ok(smallvec![self.attend(cx, x, self.bias.unwrap_or(true))?])
    }

    fn attentions(&self, path: &str, tp_mesh: Option<&str>, found: &mut Vec<Attention>) {
        let (path, tp_mesh) = (path.to_string(), tp_mesh.map(str::to_string));
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        let name = if self.name.is_empty() { path.clone() } else { self.name.clone() };
        found.push(Attention { path, name, heads: self.heads, kv_heads, tp_mesh });
    }
}

impl MultiheadAttention {
    /// All but the norm before it.
    pub(super) fn attend(
        &self,
        cx: &mut Cx<'_>,
        x: Value,
        bias: bool,
    ) -> Result<Value, ModelError> {
        let (width, kv_heads) = (cx.width(x), self.kv_heads.unwrap_or(self.heads));
        let head_dim = match self.head_dim {
            Some(it) => it,
            None if width.is_multiple_of(self.heads) => width / self.heads,
            None => {
                let (field, found) = ("heads".to_string(), self.heads.to_string());
                let expected =
                    format!("a divisor of the {width} features of its input, or give `head_dim`");
                return Err(cx.error("heads", Problem::Range { field, found, expected }));
            }
        };
        let start = Start::of("init", self.init, cx.model.init);
        let output_default = cx.model.output_init.map_or(start, Start::from);
        let output_start = Start::of("output_init", self.output_init, output_default);
        let qkv_bias = self.qkv_bias.unwrap_or(bias);
        let kv = Parallel::Column {
            compute: cx.tp.cut_heads(kv_heads, &cx.layout.mesh),
            storage: cx.tp.cut(),
        };
        let parts = [
            ("q", "q_proj", self.heads, Parallel::column(cx)),
            ("k", "k_proj", kv_heads, kv.clone()),
            ("v", "v_proj", kv_heads, kv),
        ];
        let mut qkv = [x; 3];
        for ((name, key, heads, parallel), value) in parts.into_iter().zip(&mut qkv) {
            let out = heads.checked_mul(head_dim).filter(|&it| it <= MAX_SIZE);
            let Some(out) = out else {
                let field = "heads times head_dim".to_string();
                let found = format!("{heads} times {head_dim}");
                let problem = Problem::Range { field, found, expected: "at most 2^40".into() };
                return Err(cx.error("head_dim", problem));
            };
            let projection = Projection { out, bias: qkv_bias, parallel, start, options: None };
            *value = cx.scoped_part(key, |cx| projection.apply(cx, x))?;
            if name == "v" {
                continue;
            }
            if let Some(norm) = self.qk_norm {
                let key = format!("{name}_norm");
                *value = cx.scoped_part(&key, |cx| norm_heads(cx, norm, *value, head_dim))?;
            }
            if let Some(rope) = &self.rope {
                *value = rope.turn(cx, &format!("{name}.rope"), *value, head_dim)?;
            }
        }
        let core = Core { head_dim, causal: self.causal, scale: self.scale };
        let o = attend(cx, "core", core, qkv)?;
        let (parallel, start) = (Parallel::Row, output_start);
        let projection = Projection { out: width, bias, parallel, start, options: None };
        cx.scoped_part("o_proj", |cx| projection.apply(cx, o))
    }
}

/// Normalizes each head.
fn norm_heads(cx: &mut Cx<'_>, norm: Norm, x: Value, head_dim: u64) -> Result<Value, ModelError> {
    let dim = cx.ty(x).ndim() - 1;
    let heads = cx.op("heads", SplitDim { dim, inner: head_dim }, &[x])?;
    let normal = norm.apply(cx, heads)?;
    cx.op("merged", MergeDims { dim }, &[normal])
}
