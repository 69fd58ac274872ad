//! `Graph`: one training step as an SSA DAG over global tensors.
//!
//! A graph has four sections, run in this order: `Prepare` makes compute weights from master
//! weights, `Forward` and `Backward` run once a micro-batch, `Update` runs once a step. Training is
//! not SSA, so what survives a step is a *state* value, and [`Graph::stores`] lists which value
//! replaces it at the end of a section. A value that `Update` reads from an earlier section simply
//! lives until then.

use cranelift_entity::{PrimaryMap, SecondaryMap, entity_impl};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

use crate::Phase;
use crate::ops::Op;
use crate::placement::{AxisSet, Mesh, Sharding};
use crate::quant::Recipe;
use crate::range::{Ranged, RealRange};
use crate::run::Run;
use crate::types::TensorType;

/// Names are the model's, dotted as in PyTorch: `model.layers.0.mlp.up_proj.weight`.
pub type Name = String;

/// A node of a [`Graph`]: one application of an op.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node(u32);
entity_impl!(Node, "n");

/// A value of a [`Graph`]: a tensor that a node made, or that the step starts with.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(u32);
entity_impl!(Value, "v");

/// A module of the model, for units, policies, names and reports.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scope(u32);
entity_impl!(Scope, "scope");

/// One training step. See the [module docs](self).
#[derive(Debug, Clone)]
pub struct Graph {
    /// The model's name.
    pub name: Name,
    /// The device mesh; the only thing that a graph knows about the machine.
    pub mesh: Mesh,
    /// Axes over which a weight's scale must agree, unless its module says otherwise; if not declared, those
    /// that shard the weight.
    pub weight_mesh: Option<AxisSet>,
    /// How far this program has come.
    pub phase: Phase,
    /// Micro-batches of one step: how often `Forward` and `Backward` run before `Update`.
    pub micro_batches: u32,
    /// All nodes ever made; the program is [`Graph::order`].
    pub nodes: PrimaryMap<Node, NodeData>,
    /// All values ever made.
    pub values: PrimaryMap<Value, ValueData>,
    /// The program, a topological order in which sections are contiguous and in order.
    pub order: Vec<Node>,
    /// Module tree. Entry 0 is the model itself.
    pub scopes: PrimaryMap<Scope, ScopeData>,
    /// Trainable and frozen parameters, in the order of the model.
    pub params: Vec<Param>,
    /// What is written back, in order.
    pub stores: Vec<Store>,
    /// Named results: `loss_sum` and `loss_count` of a micro-batch until `update` makes `loss`,
    /// `grad_norm` of a step.
    pub results: Vec<(Name, Value)>,
    /// How parameters are trained.
    pub training: Training,
    /// Data and schedule, for the plan.
    pub run: Run,
    /// What `propagate-shardings` decided to move; a report, not part of the program.
    pub moves: Vec<Move>,
    /// What GEMMs make that a recipe wants quantized and that `quantize` left as they are, and why; a report,
    /// too.
    pub unquantized: Vec<(Name, String)>,
    /// Weights in blocks of which `round-cuts` compared two ways to cut them; a report, too.
    pub cuts: Vec<Cut>,
    /// What `choose-amax-groups` found in declared weight meshes; a report, not part of the program.
    pub weight_mesh_lints: Vec<WeightMeshLint>,
}

/// A declared `weight_mesh` that does not name the axes that shard its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightMeshLint {
    /// What is wrong with it.
    pub problem: WeightMeshProblem,
    /// The axes with which it is.
    pub axes: AxisSet,
    /// As declared.
    pub weight_mesh: AxisSet,
    /// Axes that shard each of these weights; some of them, where none is sharded over `axes`.
    pub sharded: AxisSet,
    /// The weights.
    pub weights: Vec<Name>,
}

/// What can be wrong with a declared `weight_mesh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightMeshProblem {
    /// It misses axes, over which scales vary.
    Varies,
    /// It misses axes over which scales agree all the same, because codes are gathered over them.
    Gathered,
    /// It misses axes over which scales agree all the same, because a history is one state.
    History,
    /// It misses axes over which scales agree all the same: they cut no equal pieces.
    Uneven,
    /// It names axes over which none of its weights is sharded.
    Replicas,
}

/// A value that is moved because the shardings around it disagree, the cheapest way to settle them.
#[derive(Debug, Clone, PartialEq)]
pub struct Move {
    /// The value.
    pub value: Name,
    /// What reads it elsewhere; the value itself where its own op makes it elsewhere.
    pub reader: Name,
    /// Where it is.
    pub from: Sharding,
    /// Where it is wanted.
    pub to: Sharding,
    /// Whether the user placed it (a weight, or a batch of data) and it is sent to other ranks.
    pub placed: bool,
}

/// A weight in blocks that FSDP would cut within a block.
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// The weight.
    pub weight: Name,
    /// Cut as evenly as can be, so that it is gathered in the type that computes.
    pub even: Sharding,
    /// Cut between blocks, so that it is gathered as codes.
    pub rounded: Sharding,
    /// Seconds of collectives of a micro-batch, of `even` and of `rounded`.
    pub seconds: [f64; 2],
}

impl Cut {
    /// Whether the weight is cut between blocks: where that is cheaper.
    pub fn is_rounded(&self) -> bool {
        self.seconds[1] < self.seconds[0]
    }
}

/// How parameters are trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// The update rule.
    pub optimizer: Optimizer,
    /// Gradients are scaled down to this global norm.
    pub clip_norm: Option<f64>,
    /// When gradients are reduced over data-parallel axes.
    pub reduce: Reduction,
}

/// The update rule of a parameter, in PyTorch's meaning.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Optimizer {
    /// Adam with decoupled weight decay.
    AdamW {
        /// Decay rates of the first and second moment.
        betas: (f64, f64),
        /// Added to the root of the second moment.
        eps: f64,
        /// Decoupled decay.
        weight_decay: f64,
    },
    /// Adam; weight decay is added to the gradient.
    Adam {
        /// Decay rates of the first and second moment.
        betas: (f64, f64),
        /// Added to the root of the second moment.
        eps: f64,
        /// Decay, as a gradient.
        weight_decay: f64,
    },
    /// Gradient descent with momentum.
    Sgd {
        /// Decay rate of the momentum buffer; none is kept at 0.
        momentum: f64,
        /// Decay, as a gradient.
        weight_decay: f64,
    },
}

/// When gradients are reduced over data-parallel axes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduction {
    /// After every micro-batch: accumulators are as small as the parameter's shard.
    #[default]
    EveryMicroBatch,
    /// Once a step: accumulators are as large as the gathered weight.
    LastMicroBatch,
}

/// One application of an op.
#[derive(Debug, Clone)]
pub struct NodeData {
    /// What to compute.
    pub op: Op,
    /// Operands.
    pub inputs: SmallVec<[Value; 3]>,
    /// Results.
    pub results: SmallVec<[Value; 2]>,
    /// When it runs.
    pub section: Section,
    /// The module it came from.
    pub scope: Scope,
}

/// One tensor.
#[derive(Debug, Clone)]
pub struct ValueData {
    /// Unique in the graph; never derived from an index.
    pub name: Name,
    /// Element type and *global* shape, in every phase.
    pub ty: TensorType,
    /// Where its elements live; `Some` for every value from phase `Sharded` on.
    pub sharding: Option<Sharding>,
    /// The sharding is the user's (or a module's) and may not be changed.
    pub pinned: bool,
    /// The value this one is preferably laid out like: a gradient names its primal.
    pub like: Option<Value>,
    /// Where it comes from.
    pub def: Def,
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Def {
    /// Written by the runtime: a batch of data (once a micro-batch) or a scalar (once a step).
    Input,
    /// A master weight.
    Param,
    /// Anything else that survives a step: moments, histories, compute weights. Starts as zeros.
    State,
    /// A sum over the backward passes of a step, zero before the first of them. One node of `Backward` reads it, adds
    /// to it and stores the result there. Apart from that node, only `Update` reads it.
    Sum,
    /// Result `index` of `node`.
    Result {
        /// The node.
        node: Node,
        /// Which of its results.
        index: u32,
    },
}

/// When a node runs. See the [module docs](self).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(rename_all = "lowercase")]
pub enum Section {
    /// After init or load, and valid until the next update.
    Prepare,
    /// Forward pass of a micro-batch.
    #[default]
    Forward,
    /// Backward pass of a micro-batch.
    Backward,
    /// Once a step.
    Update,
}

/// A module: `model.layers.3.self_attn`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScopeData {
    /// Dotted path.
    pub path: Name,
    /// The enclosing module; `None` for the model.
    pub parent: Option<Scope>,
    /// FSDP unit this module belongs to: parameters of one unit are gathered together.
    pub unit: u32,
    /// The layer of the model that this module belongs to, counted from 0. Values that one layer reads from another are
    /// kept for the backward pass.
    pub layer: Option<u32>,
    /// Which activations of this module are recomputed in the backward pass.
    pub checkpoint: Checkpoint,
    /// What becomes of the unit's gathered weights after the forward pass.
    pub after_forward: AfterForward,
    /// Axes over which its weights' scales must agree, as declared; else see [`Graph::weight_mesh`].
    pub weight_mesh: Option<AxisSet>,
    /// How its GEMMs are quantized.
    pub recipe: Recipe,
}

/// What becomes of gathered weights between the forward and the backward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AfterForward {
    /// They stay.
    #[default]
    Keep,
    /// They are dropped, and gathered again from where they are stored.
    Drop,
    /// A piece of them stays with each rank, cut over these axes, over which they are gathered again.
    KeepPiece(AxisSet),
}

/// Activation checkpointing policy of a layer. Ops are named as in the model. Each op says which name covers it:
/// [`StandsFor`](crate::ops::StandsFor).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Checkpoint {
    /// Keep everything that the backward pass reads.
    #[default]
    None,
    /// Keep only what enters the layer.
    Full,
    /// Keep what these ops and kinds of collectives make, recompute the rest.
    Selective(Vec<String>),
    /// Recompute what these ops make, keep the rest.
    Recompute(Vec<String>),
}

impl Checkpoint {
    /// The ops and kinds of collectives that it lists.
    pub fn listed(&self) -> &[String] {
        match self {
            Checkpoint::None | Checkpoint::Full => &[],
            Checkpoint::Selective(ops) | Checkpoint::Recompute(ops) => ops,
        }
    }
}

/// A parameter of the model and what the compiler made for it.
#[derive(Debug, Clone)]
pub struct Param {
    /// The master weight; its value name is the parameter's name, its sharding that of storage.
    pub value: Value,
    /// The weight in compute dtype, still in storage layout; the master itself when dtypes agree.
    pub compute: Value,
    /// The weight as modules read it: gathered over the FSDP axes.
    pub full: Value,
    /// The storage layout with the axes of size 1 by which the model cuts it, as PyTorch labels it; `None` where that
    /// is the stored layout.
    pub label: Option<Sharding>,
    /// How it starts.
    pub init: Init,
    /// Weight decay applies to it.
    pub decay: bool,
    /// It is trained.
    pub trainable: bool,
    /// The user said where all of it is stored, so nothing cuts it otherwise.
    pub placed: bool,
    /// Type in which its gradient is reduced over data-parallel axes.
    pub reduce_dtype: crate::DType,
    /// The module it belongs to.
    pub scope: Scope,
    /// Other names of the same tensor (tied weights).
    pub aliases: Vec<Name>,
    /// Gradient of the summed loss in storage layout (f32); set by `autodiff`.
    pub grad: Option<Value>,
}

/// How a parameter starts: values depend on (seed, name, global index) and on nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Gaussian.
    Normal {
        /// Mean.
        #[serde(default)]
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
    /// Uniform on `[low, high)`.
    Uniform {
        /// Least value.
        low: f64,
        /// Bound of the values.
        high: f64,
    },
}

impl Init {
    /// The real numbers, each with the range that it must be in.
    pub fn numbers(&self) -> SmallVec<[Ranged; 2]> {
        let number = Ranged::new;
        match *self {
            Init::Zeros | Init::Ones => smallvec![],
            Init::Normal { mean, std } => smallvec![
                number("mean", mean, RealRange::Finite),
                number("std", std, RealRange::NotNegative),
            ],
            Init::Uniform { low, high } => smallvec![
                number("low", low, RealRange::Finite),
                number("high", high, RealRange::Above { name: "low", bound: low }),
            ],
        }
    }
}

/// `state` holds `value` from the end of `value`'s section on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store {
    /// A `State`, `Sum` or `Param` value.
    pub state: Value,
    /// Its next content.
    pub value: Value,
    /// The section at whose end it is written.
    pub section: Section,
}

impl Graph {
    /// An empty graph over `mesh`, with the model's own scope.
    pub fn new(name: &str, mesh: Mesh) -> Graph {
        let mut scopes = PrimaryMap::new();
        scopes.push(ScopeData::default());
        Graph {
            name: name.to_string(),
            mesh,
            weight_mesh: None,
            phase: Phase::Logical,
            micro_batches: 1,
            nodes: PrimaryMap::new(),
            values: PrimaryMap::new(),
            order: Vec::new(),
            scopes,
            params: Vec::new(),
            stores: Vec::new(),
            results: Vec::new(),
            training: Training {
                optimizer: Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 },
                clip_norm: None,
                reduce: Reduction::default(),
            },
            run: Run::default(),
            moves: Vec::new(),
            unquantized: Vec::new(),
            cuts: Vec::new(),
            weight_mesh_lints: Vec::new(),
        }
    }

    /// The type of a value.
    pub fn ty(&self, value: Value) -> &TensorType {
        &self.values[value].ty
    }

    /// The sharding of a value.
    ///
    /// # Panics
    /// Before `propagate-shardings`, where a value may have none.
    pub fn sharding(&self, value: Value) -> &Sharding {
        let data = &self.values[value];
        data.sharding.as_ref().unwrap_or_else(|| panic!("`{}` has no sharding yet", data.name))
    }

    /// Lets a node do something else.
    pub fn set_op(&mut self, node: Node, op: Op, inputs: &[Value], results: &[Value]) {
        for (index, &result) in (0..).zip(results) {
            self.values[result].def = Def::Result { node, index };
        }
        let data = &mut self.nodes[node];
        data.op = op;
        data.inputs = SmallVec::from_slice(inputs);
        data.results = SmallVec::from_slice(results);
    }

    /// The node that makes `value`, if one does.
    pub fn producer(&self, value: Value) -> Option<Node> {
        match self.values[value].def {
            Def::Result { node, .. } => Some(node),
            Def::Input | Def::Param | Def::State | Def::Sum => None,
        }
    }

    /// Section in which `value` exists first; inputs, parameters and states exist from the start.
    pub fn section(&self, value: Value) -> Section {
        self.producer(value).map_or(Section::Prepare, |it| self.nodes[it].section)
    }

    /// Values that must be kept whatever reads them: results and stored values.
    pub fn roots(&self) -> impl Iterator<Item = Value> + '_ {
        let stored = self.stores.iter().map(|it| it.value);
        self.results.iter().map(|it| it.1).chain(stored)
    }

    /// Reads `same[v]` wherever `v` was read; chains are followed.
    pub fn replace(&mut self, same: &SecondaryMap<Value, Option<Value>>) {
        let find = |mut value: Value| {
            while let Some(next) = same[value] {
                value = next;
            }
            value
        };
        for &node in &self.order {
            for input in &mut self.nodes[node].inputs {
                *input = find(*input);
            }
        }
        for param in &mut self.params {
            param.compute = find(param.compute);
            param.full = find(param.full);
            param.grad = param.grad.map(find);
        }
        self.stores.iter_mut().for_each(|it| it.value = find(it.value));
        self.results.iter_mut().for_each(|it| it.1 = find(it.1));
    }

    /// Makes a value without a producer.
    pub fn add_leaf(&mut self, name: Name, ty: TensorType, def: Def) -> Value {
        self.values.push(ValueData { name, ty, sharding: None, pinned: false, like: None, def })
    }

    /// Makes a node and its result values, without placing the node in [`Graph::order`].
    pub fn add_node(&mut self, data: NewNode<'_>) -> Node {
        let node = self.nodes.next_key();
        let mut results = SmallVec::new();
        for (index, (name, ty)) in data.results.iter().enumerate() {
            let def = Def::Result { node, index: index as u32 };
            results.push(self.add_leaf(name.clone(), ty.clone(), def));
        }
        self.nodes.push(NodeData {
            op: data.op,
            inputs: SmallVec::from_slice(data.inputs),
            results,
            section: data.section,
            scope: data.scope,
        })
    }
}

/// Argument of [`Graph::add_node`].
pub struct NewNode<'a> {
    /// What to compute.
    pub op: Op,
    /// Operands.
    pub inputs: &'a [Value],
    /// Names and types of the results.
    pub results: &'a [(Name, TensorType)],
    /// When it runs.
    pub section: Section,
    /// The module it belongs to.
    pub scope: Scope,
}
