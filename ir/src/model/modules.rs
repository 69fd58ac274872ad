//! Every module of `model.ron`, one file each. To add one: write the file, add it to
//! `define_modules!`.
//!
//! A module reads the tensors that the one before it made and appends nodes to the graph. Names and
//! meaning are TransformerEngine's. All modules have the options of [`Common`].

use serde::{Deserialize, Serialize};

use super::elaborate::{Cx, Values};
use super::error::ModelError;
use super::range::Fields;
use super::schema::Ordered;
use crate::quant::Recipe;

/// Defines the struct of a module: its own fields and those that every module has.
macro_rules! module {
    ($(#[$meta:meta])* pub struct $ty:ident { $($(#[$field_meta:meta])* pub $field:ident: $field_ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $ty {
            /// Dotted path, below that of the module around it.
            #[serde(default)]
            pub name: String,
            $($(#[$field_meta])* pub $field: $field_ty,)*
            /// The tensor-parallel axis, if not that of the module around.
            #[serde(default)]
            pub tp_mesh: Option<String>,
            /// Sequence parallelism, if not as in the module around.
            #[serde(default)]
            pub sequence_parallel: Option<bool>,
            /// Axes over which the scales of its weights must agree.
            #[serde(default)]
            pub weight_mesh: Option<Vec<String>>,
            /// How its GEMMs are quantized, if not as in the module around.
            #[serde(default)]
            pub recipe: Option<$crate::quant::Recipe>,
            /// Other paths for its parts: `{"q_proj": "wq"}`.
            #[serde(default)]
            pub names: $crate::model::schema::Ordered<String>,
        }

        impl $ty {
            fn common_options(&self) -> $crate::model::modules::Common<'_> {
                $crate::model::modules::Common {
                    name: &self.name,
                    tp_mesh: self.tp_mesh.as_deref(),
                    sequence_parallel: self.sequence_parallel,
                    weight_mesh: self.weight_mesh.as_deref(),
                    recipe: self.recipe.as_ref(),
                    names: &self.names,
                }
            }
        }
    };
}

macro_rules! define_modules {
    ($($file:ident :: { $($ty:ident),* },)*) => {
        $(pub mod $file; $(pub use $file::$ty;)*)*

        /// One of the modules below, with its options.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[allow(missing_docs, clippy::large_enum_variant)]
        pub enum Module { $($($ty($ty),)*)* }

        impl Module {
            /// What the module does.
            pub fn def(&self) -> &dyn ModuleDef {
                match self { $($(Module::$ty(it) => it,)*)* }
            }
        }
    };
}

define_modules! {
    activation::{Activation},
    block::{Block},
    cross_entropy::{CrossEntropy},
    dot_product_attention::{DotProductAttention},
    dropout::{Dropout},
    embedding::{Embedding},
    layer_norm_linear::{LayerNormLinear},
    layer_norm_mlp::{LayerNormMlp},
    linear::{Linear},
    lm_head::{LmHead},
    multihead_attention::{MultiheadAttention},
    norm::{LayerNorm, RmsNorm},
    position_embedding::{PositionEmbedding},
    repeat::{Repeat},
    residual::{Residual},
    rope::{Rope},
    transformer_layer::{TransformerLayer},
}

/// What it means to be a module.
pub trait ModuleDef {
    /// The options that all modules have.
    fn common(&self) -> Common<'_>;

    /// Checks the ranges of the module's numbers.
    fn check(&self, fields: &Fields) -> Result<(), ModelError>;

    /// Appends the module's nodes. Names, scope and errors are those of the module at hand.
    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError>;

    /// Returns true for a layer of the model. FSDP gathers the weights of a layer together, and activation
    /// checkpointing recomputes a layer as a whole.
    fn is_layer(&self) -> bool {
        false
    }

    /// The number of layers that it is or contains.
    fn n_layers(&self) -> u64 {
        self.is_layer().into()
    }

    /// The attentions in this module, which is at `path`: their KV heads decide how the
    /// tensor-parallel axis is refined. `tp_mesh` is that of the module around.
    fn attentions(&self, _path: &str, _tp_mesh: Option<&str>, _found: &mut Vec<Attention>) {}
}

/// The options that all modules have.
#[derive(Debug, Clone, Copy)]
pub struct Common<'a> {
    /// Dotted path, below that of the module around.
    pub name: &'a str,
    /// The tensor-parallel axis, if not that of the module around.
    pub tp_mesh: Option<&'a str>,
    /// Sequence parallelism, if not as in the module around.
    pub sequence_parallel: Option<bool>,
    /// Axes over which the scales of its weights must agree.
    pub weight_mesh: Option<&'a [String]>,
    /// How its GEMMs are quantized, if not as in the module around.
    pub recipe: Option<&'a Recipe>,
    /// Other paths for its parts.
    pub names: &'a Ordered<String>,
}

impl Common<'_> {
    /// The fields, each with whether the model says anything there.
    pub(super) fn stated(&self) -> [(&'static str, bool); 6] {
        let Common { name, tp_mesh, sequence_parallel, weight_mesh, recipe, names } = self;
        [
            ("name", !name.is_empty()),
            ("tp_mesh", tp_mesh.is_some()),
            ("sequence_parallel", sequence_parallel.is_some()),
            ("weight_mesh", weight_mesh.is_some()),
            ("recipe", recipe.is_some()),
            ("names", !names.0.is_empty()),
        ]
    }
}

/// Heads of one attention module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attention {
    /// Where it is in the source.
    pub path: String,
    /// What to call it.
    pub name: String,
    /// Query heads.
    pub heads: u64,
    /// Key-value heads.
    pub kv_heads: u64,
    /// Its tensor-parallel axis, if not the model's.
    pub tp_mesh: Option<String>,
}

/// The number of layers in a list of modules.
pub(super) fn layers_in(modules: &[Module]) -> u64 {
    modules.iter().fold(0, |n, it| it.def().n_layers().saturating_add(n))
}

/// The attentions of a list of modules.
pub(super) fn attentions(modules: &[Module], field: &str, found: &mut Vec<Attention>) {
    attentions_in(modules, field, None, found);
}

pub(crate) fn attentions_in(
    modules: &[Module],
    field: &str,
    tp_mesh: Option<&str>,
    found: &mut Vec<Attention>,
) {
    for (i, module) in modules.iter().enumerate() {
        let def = module.def();
        let tp_mesh = def.common().tp_mesh.or(tp_mesh);
        def.attentions(&format!("{field}[{i}]"), tp_mesh, found);
    }
}

/// Serde default: yes.
pub(crate) fn yes() -> bool {
    true
}
