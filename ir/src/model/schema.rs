//! The RON schema of `model.ron`, apart from the modules (see [`super::modules`]).
//!
//! Every struct denies unknown fields and has its defaults in one `Default` impl. Words that name
//! tensors are patterns for full names of parameters (see [`NamePattern`](super::NamePattern)).

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::modules::Module;
use super::names::Names;
use crate::DType;
use crate::graph::{Checkpoint, Init, Optimizer, Reduction};
use crate::placement::{Placement, ReduceOp};
use crate::quant::Recipe;
use crate::run::Schedule;

/// A model and how it is trained: all of `model.ron`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The model's name.
    pub name: String,
    /// Names of the mesh's axes, by how many there are.
    #[serde(default = "default_meshes")]
    pub meshes: BTreeMap<usize, Vec<String>>,
    /// Sequences of one step.
    pub batch: Batch,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Parts into which a step's batch is cut: gradient accumulation.
    #[serde(default = "one")]
    pub micro_batches: u32,
    /// Axes over which the batch is sharded; by default `dp`, `dp_replicate` and `dp_shard`, as far
    /// as a mesh of the model has them.
    #[serde(default)]
    pub data_parallel: Option<Vec<String>>,
    /// Sharding of parameters over data-parallel axes.
    #[serde(default)]
    pub fsdp: Fsdp,
    /// The tensor-parallel axis; by default `tp`, if a mesh of the model has it.
    #[serde(default)]
    pub tp_mesh: Option<String>,
    /// Axes along which all ranks do the same work. Any other axis must cut something.
    #[serde(default)]
    pub replicas: Vec<String>,
    /// Activations between tensor-parallel regions are sharded over their sequence dimension.
    #[serde(default)]
    pub sequence_parallel: bool,
    /// Axes over which the scale of a quantized weight must agree; by default those that shard it.
    #[serde(default)]
    pub weight_mesh: Option<Vec<String>>,
    /// Element types.
    #[serde(default)]
    pub precision: Precision,
    /// How GEMMs are quantized, unless their module says otherwise.
    #[serde(default)]
    pub recipe: Recipe,
    /// How weights start; biases start as zeros and norms as ones.
    #[serde(default = "default_init")]
    pub init: Init,
    /// How weights that write to the residual stream start; `init` by default.
    #[serde(default)]
    pub output_init: Option<Init>,
    /// How parameters inside a module are called.
    #[serde(default)]
    pub names: Names,
    /// Activation checkpointing of layers.
    #[serde(default)]
    pub checkpoint: Checkpoint,
    /// The update rule.
    #[serde(default)]
    pub optimizer: OptimizerSpec,
    /// Learning rate over steps.
    #[serde(default = "default_schedule")]
    pub schedule: Schedule,
    /// Gradients are scaled down to this global norm.
    #[serde(default)]
    pub clip_norm: Option<f64>,
    /// When gradients are reduced over data-parallel axes.
    #[serde(default)]
    pub reduce_gradients: Reduction,
    /// Parameters that decay; by default those of two and more dimensions.
    #[serde(default)]
    pub decay: Vec<String>,
    /// Parameters that do not decay.
    #[serde(default)]
    pub no_decay: Vec<String>,
    /// Parameters that are not trained.
    #[serde(default)]
    pub frozen: Vec<String>,
    /// `(alias, name)`: the parameter `alias` is the parameter `name`.
    #[serde(default)]
    pub tied: Vec<(String, String)>,
    /// Options of parameters; where several patterns match, later ones win.
    #[serde(default)]
    pub parameters: Ordered<ParamOptions>,
    /// Steps to train unless the command line says otherwise.
    #[serde(default = "default_steps")]
    pub steps: u64,
    /// Seed of initial weights, dropout and generated data.
    #[serde(default)]
    pub seed: u64,
    /// The modules, each reading what the one before it made; the first reads the tokens.
    pub layers: Vec<Module>,
}

fn default_meshes() -> BTreeMap<usize, Vec<String>> {
    let names: [&[&str]; 3] = [&["dp"], &["dp", "tp"], &["dp_replicate", "dp_shard", "tp"]];
    let owned = |it: &[&str]| it.iter().map(|it| it.to_string()).collect();
    names.iter().map(|it| (it.len(), owned(it))).collect()
}

fn one() -> u32 {
    1
}

fn default_init() -> Init {
    Init::Normal { mean: 0.0, std: 0.02 }
}

fn default_schedule() -> Schedule {
    crate::run::Run::default().schedule
}

fn default_steps() -> u64 {
    20
}

/// Sequences of one step, over all micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Batch {
    /// In all.
    Global(u64),
    /// For each coordinate of the data-parallel axes.
    PerReplica(u64),
}

/// How parameters are sharded over data-parallel axes (FSDP; HSDP where an axis only replicates).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fsdp {
    /// The axes; by default `dp` and `dp_shard`, as far as a mesh of the model has them. None: `[]`.
    pub axes: Option<Vec<String>>,
    /// The dimension that they shard; a parameter of fewer dimensions is sharded along its last.
    pub dim: usize,
    /// The modules that are gathered together.
    pub units: Units,
    /// Resharding after the forward pass: layers, except the last, gather their weights again for the backward pass,
    /// within groups of this size if it is a number.
    pub reshard_after_forward: ReshardAfterForward,
    /// The same for all other modules: embedding, final norm, head.
    pub reshard_root: bool,
}

impl Default for Fsdp {
    fn default() -> Fsdp {
        Fsdp {
            axes: None,
            dim: 0,
            units: Units::EachLayer,
            reshard_after_forward: ReshardAfterForward::Flag(true),
            reshard_root: false,
        }
    }
}

/// PyTorch's `reshard_after_forward`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ReshardAfterForward {
    /// True: gathered again from all ranks that store a piece. False: kept.
    Flag(bool),
    /// Kept by each group of so many neighbours, and gathered again from those.
    Group(u64),
}

impl<'de> Deserialize<'de> for ReshardAfterForward {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ReshardAfterForward;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("true, false or a number of ranks")
            }

            fn visit_bool<E>(self, it: bool) -> Result<Self::Value, E> {
                Ok(ReshardAfterForward::Flag(it))
            }

            fn visit_u64<E>(self, it: u64) -> Result<Self::Value, E> {
                Ok(ReshardAfterForward::Group(it))
            }
        }
        from.deserialize_any(Visitor)
    }
}

/// The modules of one FSDP unit. A layer is a `TransformerLayer`, or an iteration of a `Repeat` without one. The
/// modules before the first layer are one unit, and those after the last layer another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Units {
    /// Each layer, with the modules up to the next one.
    EachLayer,
    /// Groups of this many layers, with the modules between them.
    Layers(u32),
    /// The whole model is one unit.
    Model,
}

/// Element types. As in PyTorch's `MixedPrecisionPolicy`, with the storage type added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Precision {
    /// Of master weights.
    pub storage: DType,
    /// Of weights and activations in forward and backward.
    pub compute: DType,
    /// In which gradients are reduced over data-parallel axes.
    pub reduce: DType,
    /// Of the logits; `compute` by default. The loss itself is in f32 in any case.
    pub output: Option<DType>,
    /// An input of a module that is not in `compute` is cast; otherwise it is an error.
    pub cast_inputs: bool,
}

impl Default for Precision {
    fn default() -> Precision {
        let (storage, compute, reduce) = (DType::F32, DType::F32, DType::F32);
        Precision { storage, compute, reduce, output: None, cast_inputs: true }
    }
}

/// The update rule of parameters, in PyTorch's meaning and with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum OptimizerSpec {
    /// Adam with decoupled weight decay.
    AdamW {
        /// Decay rates of the first and second moment.
        #[serde(default = "default_betas")]
        betas: (f64, f64),
        /// Added to the root of the second moment.
        #[serde(default = "default_eps")]
        eps: f64,
        /// Decoupled decay.
        #[serde(default = "default_decay")]
        weight_decay: f64,
    },
    /// Adam; weight decay is added to the gradient.
    Adam {
        /// Decay rates of the first and second moment.
        #[serde(default = "default_betas")]
        betas: (f64, f64),
        /// Added to the root of the second moment.
        #[serde(default = "default_eps")]
        eps: f64,
        /// Decay, as a gradient.
        #[serde(default)]
        weight_decay: f64,
    },
    /// Gradient descent with momentum.
    Sgd {
        /// Decay rate of the momentum buffer; none is kept at 0.
        #[serde(default)]
        momentum: f64,
        /// Decay, as a gradient.
        #[serde(default)]
        weight_decay: f64,
    },
}

fn default_betas() -> (f64, f64) {
    (0.9, 0.999)
}

fn default_eps() -> f64 {
    1e-8
}

fn default_decay() -> f64 {
    0.01
}

impl Default for OptimizerSpec {
    fn default() -> OptimizerSpec {
        let (betas, eps) = (default_betas(), default_eps());
        OptimizerSpec::AdamW { betas, eps, weight_decay: default_decay() }
    }
}

impl From<OptimizerSpec> for Optimizer {
    fn from(it: OptimizerSpec) -> Optimizer {
        match it {
            OptimizerSpec::AdamW { betas, eps, weight_decay } => {
                Optimizer::AdamW { betas, eps, weight_decay }
            }
            OptimizerSpec::Adam { betas, eps, weight_decay } => {
                Optimizer::Adam { betas, eps, weight_decay }
            }
            OptimizerSpec::Sgd { momentum, weight_decay } => {
                Optimizer::Sgd { momentum, weight_decay }
            }
        }
    }
}

/// What a user may say about one parameter; what is left out follows from its module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParamOptions {
    /// How it starts.
    pub init: Option<Init>,
    /// Element type of the master weight.
    pub dtype: Option<DType>,
    /// Where it lives, by mesh axis, in PyTorch's meaning. Axes left out replicate; FSDP axes are
    /// added unless one of them is named.
    pub placements: Option<Placements>,
    /// The dimension that FSDP shards.
    pub fsdp_dim: Option<usize>,
    /// Weight decay applies to it.
    pub decay: Option<bool>,
    /// It is trained.
    pub trainable: Option<bool>,
}

/// Placements by mesh axis: `{"tp": Shard(0)}`.
pub type Placements = BTreeMap<String, PlacementSpec>;

/// PyTorch's placements, as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementSpec {
    /// Every coordinate holds the same.
    Replicate,
    /// The axis cuts this dimension.
    Shard(u8),
    /// The axis cuts each of `.1` pieces of dimension `.0`.
    StridedShard(u8, u32),
    /// What is held must be reduced over the axis; for values of a block, not for parameters.
    Partial(ReduceOp),
}

impl From<PlacementSpec> for Placement {
    fn from(it: PlacementSpec) -> Placement {
        match it {
            PlacementSpec::Replicate => Placement::Replicate,
            PlacementSpec::Shard(dim) => Placement::Shard { dim },
            PlacementSpec::StridedShard(dim, split) => Placement::StridedShard { dim, split },
            PlacementSpec::Partial(op) => Placement::Partial(op),
        }
    }
}

/// A map that keeps the order in which it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ordered<T>(pub Vec<(String, T)>);

impl<T> Default for Ordered<T> {
    fn default() -> Ordered<T> {
        Ordered(Vec::new())
    }
}

impl<T: Serialize> Serialize for Ordered<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        self.0.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
        map.end()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Ordered<T>, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map `{\"name\": value}`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ordered<T>, A::Error> {
                let mut res = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    res.push(entry);
                }
                Ok(Ordered(res))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}
