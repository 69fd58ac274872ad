//! `elaborate`: from the parsed model and a mesh to a graph of phase `Logical`.
//!
//! Pinned are weights (storage and compute layouts), the batch, and the residual stream: batch over
//! the data-parallel axes, sequence over the tensor-parallel one under sequence parallelism. All
//! else, also inside column- and row-parallel regions, follows from these by propagation.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};

use super::error::{At, ModelError, Problem};
use super::layout::{Layout, Tp};
use super::mesh::MeshSpec;
use super::modules::{Common, Module, ModuleDef, layers_in};
use super::names::{PartNames, join};
use super::range::{Fields, MAX_SIZE, too_large};
use super::schema::{Batch, Model, Units};
use crate::build::BuildError;
use crate::graph::{AfterForward, Checkpoint, Def, Scope, ScopeData, Training};
use crate::ops::{Cast, LookUp, Op, OpKind, Origin, SliceDim};
use crate::placement::{DimLayout, Sharding};
use crate::quant::Recipe;
use crate::run::Run;
use crate::{Builder, DType, Graph, TensorType, Value};

/// The largest number of ops that a `Repeat` may produce. Compiling a plan of this size takes about 7 GiB.
const MAX_OPS: usize = 1_000_000;

/// Tensors between modules.
pub type Values = SmallVec<[Value; 3]>;

/// Makes the graph of one training step of `model` on `mesh`.
pub fn elaborate(model: &Model, mesh: &MeshSpec) -> Result<Graph, ModelError> {
    check_precision(model)?;
    check_layers(model)?;
    super::range::check(model)?;
    let layout = Layout::new(model, mesh)?;
    let batch = batch(model, &layout)?;
    let mut graph = Graph::new(&model.name, layout.mesh.clone());
    graph.weight_mesh = layout.weight_mesh;
    graph.micro_batches = model.micro_batches;
    graph.training = Training {
        optimizer: model.optimizer.into(),
        clip_norm: model.clip_norm,
        reduce: model.reduce_gradients,
    };
    graph.run = Run {
        steps: model.steps,
        seed: model.seed,
        global_batch: batch,
        sequence: model.sequence,
        schedule: model.schedule.clone(),
        ..Run::default()
    };
    let root = graph.scopes.keys().next().expect("a graph has a root scope");
    let outside = Stretch::outside(model);
    graph.scopes[root].after_forward = outside.after_forward;
    graph.scopes[root].recipe = model.recipe.clone();
    let mut cx = Cx {
        model,
        layout: &layout,
        builder: Builder::new(&mut graph),
        params: FxHashMap::default(),
        patterns: super::params::Patterns::of(model)?,
        tied: super::params::ties(model)?,
        names: PartNames::default(),
        path: String::new(),
        scope_path: String::new(),
        tp: layout.tp.clone(),
        sequence_parallel: model.sequence_parallel,
        checkpoint: model.checkpoint.clone(),
        quantized: 0..u64::MAX,
        numbers: Vec::new(),
        n_layers: 0,
        layers_in_all: layers_in(&model.layers),
        stretch: outside,
        is_in_layer: false,
        labels: None,
        seed: None,
        gemm_fields: BTreeMap::new(),
    };
    let tokens = cx.input("tokens", batch / u64::from(model.micro_batches));
    cx.labels = Some(cx.input("labels", batch / u64::from(model.micro_batches)));
    cx.chain("layers", &model.layers, smallvec![tokens])?;
    super::params::check_patterns(&cx)?;
    super::params::check_effects(&cx)?;
    super::params::check_trained(&cx)?;
    cx.check_checkpoint(&model.checkpoint, 0, At::Path("checkpoint".into()))?;
    super::jobs::check(cx.builder.graph, &layout)?;
    cx.check_recipes()?;
    if graph.results.is_empty() {
        return Err(Problem::NoLoss.at(At::Path("layers".into())));
    }
    graph.run.vocab = vocab(&graph).unwrap_or(graph.run.vocab);
    // Sections are contiguous; within one, nodes stay as the modules made them.
    let Graph { order, nodes, .. } = &mut graph;
    order.sort_by_key(|&it| nodes[it].section);
    Ok(graph)
}

/// Ids that everything that looks tokens or labels up can find: rows of a table, columns of logits. The
/// runtime refuses others before a step.
fn vocab(graph: &Graph) -> Option<u64> {
    let looked_up = graph.order.iter().map(|&it| &graph.nodes[it]).filter_map(|it| {
        let types: SmallVec<[&TensorType; 4]> = it.inputs.iter().map(|&it| graph.ty(it)).collect();
        let LookUp { ids, size, .. } = it.op.looks_up(&types)?;
        (graph.values[whole(graph, it.inputs[ids])].def == Def::Input).then_some(size)
    });
    looked_up.min()
}

/// What `value` is a piece of.
fn whole(graph: &Graph, value: Value) -> Value {
    let node = graph.producer(value).map(|it| &graph.nodes[it]);
    node.filter(|it| matches!(it.op, Op::SliceDim(_))).map_or(value, |it| it.inputs[0])
}

/// Weights, activations and gradients are real numbers.
fn check_precision(model: &Model) -> Result<(), ModelError> {
    let it = &model.precision;
    let types = [
        ("storage", Some(it.storage)),
        ("compute", Some(it.compute)),
        ("reduce", Some(it.reduce)),
        ("output", it.output),
    ];
    for (field, dtype) in types {
        if let Some(dtype) = dtype.filter(|it| !it.is_float()) {
            let field = format!("precision.{field}");
            let (found, expected) = (dtype.to_string(), "f32 or bf16".to_string());
            let problem = Problem::Range { field: field.clone(), found, expected };
            return Err(problem.at(At::Path(field)));
        }
    }
    Ok(())
}

/// Refuses fields of layers in a model that has none.
fn check_layers(model: &Model) -> Result<(), ModelError> {
    if layers_in(&model.layers) > 0 {
        return Ok(());
    }
    let why =
        "this model has no layers, which are `TransformerLayer`s and the iterations of a `Repeat`";
    let stated = [
        ("checkpoint", model.checkpoint != Checkpoint::None),
        ("fsdp.units", matches!(model.fsdp.units, Units::Layers(_))),
    ];
    Fields::new("").no_effect(&stated, why)
}

/// Sequences of one step.
fn batch(model: &Model, layout: &Layout) -> Result<u64, ModelError> {
    let data_parallel = layout.data_size();
    let batch = match model.batch {
        Batch::Global(batch) => batch,
        Batch::PerReplica(batch) => {
            let all = batch.checked_mul(data_parallel).filter(|&it| it <= MAX_SIZE);
            all.ok_or_else(|| {
                let field = "batch times data-parallel coordinates".to_string();
                let found = format!("{batch} times {data_parallel}");
                let problem = Problem::Range { field, found, expected: "at most 2^40".into() };
                problem.at(At::Path("batch".into()))
            })?
        }
    };
    let micro_batches = u64::from(model.micro_batches);
    if !TensorType::fits(&[batch, model.sequence]) {
        return Err(too_large("tokens", &[batch, model.sequence]).at(At::Path("batch".into())));
    }
    if !batch.is_multiple_of(micro_batches.saturating_mul(data_parallel)) {
        let axes = layout.data_text();
        let problem = Problem::Batch { batch, micro_batches, data_parallel, axes };
        return Err(problem.at(At::Path("batch".into())));
    }
    Ok(batch)
}

/// Consecutive modules of one FSDP unit: those before the first layer, a layer with the modules up to the next
/// one, or those after the last layer.
struct Stretch {
    unit: u32,
    layer: Option<u32>,
    checkpoint: Checkpoint,
    after_forward: AfterForward,
}

impl Stretch {
    /// The modules before the first layer.
    fn outside(model: &Model) -> Stretch {
        let after_forward = match model.fsdp.reshard_root {
            true => AfterForward::Drop,
            false => AfterForward::Keep,
        };
        Stretch { unit: 0, layer: None, checkpoint: Checkpoint::None, after_forward }
    }

    /// The scope of a module that is here.
    fn scope(&self, around: &ScopeData) -> ScopeData {
        let Stretch { unit, layer, ref checkpoint, after_forward } = *self;
        ScopeData { unit, layer, checkpoint: checkpoint.clone(), after_forward, ..around.clone() }
    }
}

/// The numbers of a `Repeat`'s iterations.
pub(super) struct Numbers {
    /// Dotted path in front of the number.
    pub prefix: String,
    /// The first number, and the one after the last.
    pub range: Range<u64>,
    /// The place of the `Repeat` in the source.
    pub at: String,
}

/// What modules build with.
pub struct Cx<'a> {
    /// The model.
    pub model: &'a Model,
    /// What the axes are for.
    pub layout: &'a Layout,
    /// Where nodes go.
    pub builder: Builder<'a>,
    /// Index in [`Graph::params`] of every name of a parameter that a module has declared so far.
    pub(super) params: FxHashMap<String, usize>,
    /// The model's options for parameters, by pattern.
    pub(super) patterns: super::params::Patterns,
    /// Name of the parameter that an alias stands for.
    pub(super) tied: FxHashMap<&'a str, &'a str>,
    /// Paths of parts, where the module at hand or one around it has its own.
    names: PartNames,
    /// Where in the source we are: `layers[1].body[0]`.
    path: String,
    /// Dotted path of the module at hand; may end in `_`.
    scope_path: String,
    /// The tensor-parallel axis here.
    pub tp: Tp,
    /// Whether the residual stream is sequence-parallel here.
    pub sequence_parallel: bool,
    /// Activation checkpointing of layers here.
    pub(super) checkpoint: Checkpoint,
    /// Numbers of the layers that are quantized: not kept in `Bf16` by a `Repeat`.
    pub(super) quantized: Range<u64>,
    /// The iterations elaborated so far.
    pub(super) numbers: Vec<Numbers>,
    /// The number of layers so far, which is the next layer's number.
    pub(super) n_layers: u64,
    /// The number of layers in the model.
    layers_in_all: u64,
    /// The stretch of the current module, if it is outside of layers.
    stretch: Stretch,
    /// True while the module at hand is in a layer.
    is_in_layer: bool,
    /// The labels.
    pub labels: Option<Value>,
    /// The seed of dropout, once asked for.
    seed: Option<Value>,
    /// Fields of modules that only GEMMs read, by their place, with the GEMMs that read them in any iteration.
    gemm_fields: BTreeMap<String, GemmField>,
}

/// A field of a module that only GEMMs read.
struct GemmField {
    /// Its name.
    field: &'static str,
    /// True if the module has a GEMM that reads it.
    is_read: bool,
}

impl<'a> Cx<'a> {
    fn input(&mut self, name: &str, batch: u64) -> Value {
        let ty = TensorType::new(DType::I32, &[batch, self.model.sequence]);
        let value = self.builder.leaf(name, ty, Def::Input);
        let data = DimLayout::over(self.layout.data.iter().copied());
        self.builder.pin(value, Sharding::replicated(2).with_dim(0, data));
        value
    }

    /// The seed of this step's random values.
    pub fn seed(&mut self) -> Value {
        if let Some(seed) = self.seed {
            return seed;
        }
        let seed = self.builder.leaf("seed", TensorType::scalar(DType::I32), Def::Input);
        self.builder.pin(seed, Sharding::replicated(0));
        self.seed = Some(seed);
        seed
    }

    /// Applies modules one after the other.
    pub fn chain(
        &mut self,
        field: &str,
        modules: &[Module],
        mut values: Values,
    ) -> Result<Values, ModelError> {
        for (i, module) in modules.iter().enumerate() {
            values = self.at(&format!("{field}[{i}]"), |cx| cx.module(module.def(), values))?;
        }
        Ok(values)
    }

    /// Applies one module.
    pub fn module(&mut self, module: &dyn ModuleDef, inputs: Values) -> Result<Values, ModelError> {
        let common = module.common();
        let build = |cx: &mut Self| cx.with(common, |cx| module.build(cx, inputs));
        if module.is_layer() && !self.is_in_layer {
            return self.layer(common.name, build);
        }
        let around = &self.builder.graph.scopes[self.builder.scope];
        let data = self.inner_scope();
        let differs = common.recipe.is_some_and(|it| *it != around.recipe)
            || (module.n_layers() == 0 && data != *around);
        if common.name.is_empty() && (common.weight_mesh.is_some() || differs) {
            // Its own weight mesh or recipe, or its place behind a layer, needs a scope to be in.
            return self.scoped_as("", data, build);
        }
        self.scoped(common.name, build)
    }

    /// Runs `f` in the scope and at the field of a module that is part of another.
    pub fn part<T>(
        &mut self,
        field: &str,
        key: &str,
        common: Common<'_>,
        f: impl FnOnce(&mut Self) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        self.at(field, |cx| cx.scoped_part(key, |cx| cx.with(common, f)))
    }

    /// Runs `f` with `field` appended to the path that errors carry.
    pub fn at<T>(&mut self, field: &str, f: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.path.len();
        if before > 0 && !field.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(field);
        let res = f(self);
        self.path.truncate(before);
        res
    }

    /// Runs `f` with the options that all modules have.
    fn with<T>(
        &mut self,
        common: Common<'_>,
        f: impl FnOnce(&mut Self) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        let outer = (self.tp.clone(), self.sequence_parallel);
        Fields::new(&self.path).common(common)?;
        if let Some(name) = common.tp_mesh {
            self.tp = self.layout.tp_named(name, &format!("{}.tp_mesh", self.path))?;
        }
        if let Some(names) = common.weight_mesh {
            let axes = self.layout.axis_set(names, &format!("{}.weight_mesh", self.path))?;
            let scope = self.builder.scope;
            self.builder.graph.scopes[scope].weight_mesh = Some(axes);
        }
        if let Some(recipe) = common.recipe {
            Fields::new(&self.path).recipe("recipe", recipe)?;
            self.set_recipe(recipe);
        }
        self.sequence_parallel = common.sequence_parallel.unwrap_or(self.sequence_parallel);
        let around = self.names.enter(common.names);
        let first = self.builder.graph.nodes.len();
        let res = f(self)?;
        if common.recipe.is_some_and(|it| *it != Recipe::Bf16) {
            let is_read = self.has_gemm(first, |_| true);
            self.reads_gemm_field("recipe", is_read);
        }
        if common.weight_mesh.is_some() {
            let is_read = self.has_gemm(first, |recipe| *recipe != Recipe::Bf16);
            self.reads_gemm_field("weight_mesh", is_read);
        }
        if let Some((name, known)) = self.names.leave(common.names, around) {
            let module = self.title();
            return Err(self.error("names", Problem::UnknownPart { module, name, known }));
        }
        (self.tp, self.sequence_parallel) = outer;
        Ok(res)
    }

    /// Returns true if a node from number `first` on is a GEMM of a recipe that fits.
    fn has_gemm(&self, first: usize, fits: impl Fn(&Recipe) -> bool) -> bool {
        let graph = &*self.builder.graph;
        let nodes = graph.nodes.values().skip(first);
        let mut gemms = nodes.filter(|it| matches!(it.op, Op::Matmul(_)));
        gemms.any(|it| fits(&graph.scopes[it.scope].recipe))
    }

    fn reads_gemm_field(&mut self, field: &'static str, is_read: bool) {
        let place = format!("{}.{field}", self.path);
        let entry = self.gemm_fields.entry(place).or_insert(GemmField { field, is_read: false });
        entry.is_read |= is_read;
    }

    /// Refuses a recipe where there is no GEMM, and a `weight_mesh` where none is quantized.
    fn check_recipes(&self) -> Result<(), ModelError> {
        let fail = |place: &str, field: &str| {
            let why = match field {
                "recipe" => "nothing here is a GEMM, which is all that a recipe quantizes",
                _ => "it is of scales of quantized weights, and no recipe quantizes a weight here",
            };
            let (field, why) = (field.to_string(), why.to_string());
            Err(Problem::NoEffect { field, why }.at(At::Path(place.to_string())))
        };
        if let Some((place, it)) = self.gemm_fields.iter().find(|it| !it.1.is_read) {
            return fail(place, it.field);
        }
        if self.model.recipe != Recipe::Bf16 && !self.has_gemm(0, |_| true) {
            return fail("recipe", "recipe");
        }
        if self.model.weight_mesh.is_some() && !self.has_gemm(0, |it| *it != Recipe::Bf16) {
            return fail("weight_mesh", "weight_mesh");
        }
        Ok(())
    }

    /// Quantizes the module at hand, and what is in it, by `recipe`.
    pub fn set_recipe(&mut self, recipe: &Recipe) {
        let scope = self.builder.scope;
        self.builder.graph.scopes[scope].recipe = recipe.clone();
    }

    /// Runs `f` in the scope of the part `key`.
    pub fn scoped_part<T>(&mut self, key: &str, f: impl FnOnce(&mut Self) -> T) -> T {
        let name = self.names.path(self.model.names, key);
        self.scoped(&name, f)
    }

    /// Runs `f` in the scope of the submodule `name`; an empty name is no submodule.
    pub fn scoped<T>(&mut self, name: &str, f: impl FnOnce(&mut Self) -> T) -> T {
        if name.is_empty() {
            return f(self);
        }
        let data = self.inner_scope();
        self.scoped_as(name, data, f)
    }

    fn scoped_as<T>(&mut self, name: &str, data: ScopeData, f: impl FnOnce(&mut Self) -> T) -> T {
        let parent = self.builder.scope;
        let path = join(&self.scope_path, name).into_owned();
        let scope_path = std::mem::replace(&mut self.scope_path, path);
        let path = self.scope_path.trim_end_matches('_').to_string();
        let data = ScopeData { path, parent: Some(parent), ..data };
        self.builder.scope = self.builder.graph.scopes.push(data);
        let res = f(self);
        self.builder.scope = parent;
        self.scope_path = scope_path;
        res
    }

    /// The scope of a module in the one at hand.
    fn inner_scope(&self) -> ScopeData {
        let around = &self.builder.graph.scopes[self.builder.scope];
        if self.is_in_layer { around.clone() } else { self.stretch.scope(around) }
    }

    /// Runs `f` in the scope of the next layer, called `name` in the module at hand.
    pub fn layer<T>(&mut self, name: &str, f: impl FnOnce(&mut Self) -> T) -> T {
        let outside = Stretch::outside(self.model);
        let unit = self.stretch.unit;
        let (unit, after_forward) = match self.model.fsdp.units {
            Units::EachLayer => (unit + 1, self.layout.after_forward),
            Units::Layers(n) => {
                let starts = self.n_layers.is_multiple_of(n.into());
                (unit + u32::from(starts), self.layout.after_forward)
            }
            Units::Model => (unit, outside.after_forward),
        };
        let layer = u32::try_from(self.n_layers).ok();
        let checkpoint = self.checkpoint.clone();
        self.stretch = Stretch { unit, layer, checkpoint, after_forward };
        let mut data = self.inner_scope();
        if !self.quantized.contains(&self.n_layers) {
            data.recipe = Recipe::Bf16;
        }
        self.n_layers += 1;
        self.is_in_layer = true;
        let res = self.scoped_as(name, data, f);
        self.is_in_layer = false;
        if self.n_layers == self.layers_in_all {
            let behind = if let Units::Model = self.model.fsdp.units { unit } else { unit + 1 };
            self.stretch = Stretch { unit: behind, ..outside };
        }
        res
    }

    /// Refuses to go on if repeating has made more ops than planning holds. `index` is the last iteration made.
    pub fn check_size(&self, index: u32, n: u32) -> Result<(), ModelError> {
        let ops = self.builder.graph.nodes.len();
        if ops <= MAX_OPS {
            return Ok(());
        }
        let expected = format!(
            "less: with {} of these layers the model has {ops} ops, and planning holds {MAX_OPS}",
            index + 1
        );
        let problem = Problem::Range { field: "n".to_string(), found: n.to_string(), expected };
        Err(problem.at(self.here("n")))
    }

    /// Returns an error if the policy lists an op that no node from number `first` on has. Collectives depend on
    /// the mesh, and a recipe replaces ops: their names are right on any mesh, and under any recipe.
    pub fn check_checkpoint(
        &self,
        checkpoint: &Checkpoint,
        first: usize,
        at: At,
    ) -> Result<(), ModelError> {
        let graph = &*self.builder.graph;
        let quantizes = graph.scopes.values().any(|it| it.recipe != Recipe::Bf16);
        // Nothing outside layers is computed again, or could be.
        let nodes = graph.nodes.values().skip(first);
        let nodes = nodes.filter(|it| graph.scopes[it.scope].layer.is_some());
        let kinds = nodes.map(|it| it.op.kind());
        let kinds: FxHashSet<OpKind> =
            kinds.filter(|it| it.origins().contains(&Origin::Model)).collect();
        for name in checkpoint.listed() {
            let Some(&kind) = OpKind::ALL.iter().find(|it| it.name() == name) else { continue };
            if (quantizes && kind.origins().contains(&Origin::Recipe)) || kinds.contains(&kind) {
                continue;
            }
            let mut known: Vec<String> = kinds.iter().map(|it| it.name().to_string()).collect();
            known.sort();
            let op = name.clone();
            return Err(Problem::NoSuchOp { op, known }.at(at));
        }
        Ok(())
    }

    /// The scope of the module at hand.
    pub fn scope(&self) -> Scope {
        self.builder.scope
    }

    /// The name of something in the module at hand: `model.layers.0.self_attn` and `q`.
    pub fn name(&self, name: &str) -> String {
        match name {
            "" => self.scope_path.trim_end_matches('_').to_string(),
            _ => join(self.scope_path.trim_end_matches('_'), name).into_owned(),
        }
    }

    /// The name of a parameter of the module at hand: `weight`.
    pub fn param_name(&self, name: &str) -> String {
        join(&self.scope_path, name).into_owned()
    }

    /// Where `field` of the module at hand is.
    pub fn here(&self, field: &str) -> At {
        let dot = if field.is_empty() { "" } else { "." };
        At::Path(format!("{}{dot}{field}", self.path))
    }

    /// An error at `field` of the module at hand.
    pub fn error(&self, field: &str, problem: Problem) -> ModelError {
        problem.at(self.here(field))
    }

    /// An error of an op, at the module at hand.
    fn failed(&self, error: BuildError) -> ModelError {
        self.error("", Problem::Build(error))
    }

    /// Applies an op with one result, called `name` in the module at hand.
    pub fn op(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        inputs: &[Value],
    ) -> Result<Value, ModelError> {
        let name = self.name(name);
        let res = self.builder.op(&name, op, inputs).map_err(|it| self.failed(it))?;
        self.check_elements(&[res])?;
        Ok(res)
    }

    /// Applies an op with several results.
    pub fn ops(
        &mut self,
        names: &[&str],
        op: impl Into<Op>,
        inputs: &[Value],
    ) -> Result<SmallVec<[Value; 2]>, ModelError> {
        let names: SmallVec<[String; 3]> = names.iter().map(|it| self.name(it)).collect();
        let names: SmallVec<[&str; 3]> = names.iter().map(String::as_str).collect();
        let res = self.builder.ops(&names, op, inputs).map_err(|it| self.failed(it))?;
        self.check_elements(&res)?;
        Ok(res)
    }

    /// Refuses values that are too large.
    fn check_elements(&self, values: &[Value]) -> Result<(), ModelError> {
        for &value in values {
            let shape = &self.ty(value).shape;
            if !TensorType::fits(shape) {
                let name = &self.builder.graph.values[value].name;
                return Err(self.error("", too_large(name, shape)));
            }
        }
        Ok(())
    }

    /// The type of a value.
    pub fn ty(&self, value: Value) -> &TensorType {
        self.builder.graph.ty(value)
    }

    /// The size of the last dimension of a value; 1 for a scalar.
    pub fn width(&self, value: Value) -> u64 {
        self.ty(value).shape.last().copied().unwrap_or(1)
    }

    /// The only input of a module, in compute type.
    pub fn one(&mut self, inputs: &Values) -> Result<Value, ModelError> {
        self.exactly::<1>(inputs, "1 tensor").map(|it| it[0])
    }

    /// The inputs of a module that takes so many, floats in compute type.
    pub fn exactly<const N: usize>(
        &mut self,
        inputs: &Values,
        expected: &str,
    ) -> Result<[Value; N], ModelError> {
        let Ok(values) = <[Value; N]>::try_from(inputs.as_slice()) else {
            let (module, expected) = (self.title(), expected.to_string());
            return Err(self.error("", Problem::Inputs { module, expected, found: inputs.len() }));
        };
        let to = self.model.precision.compute;
        let mut res = values;
        for value in &mut res {
            let dtype = self.ty(*value).dtype;
            if self.model.precision.cast_inputs && dtype.is_float() && dtype != to {
                let name = format!("{}.{}", self.builder.graph.values[*value].name, to);
                *value =
                    self.builder.op(&name, Cast { to }, &[*value]).map_err(|it| self.failed(it))?;
            }
        }
        Ok(res)
    }

    /// `value`, `[b, s, ..]`, cut into `n` pieces along the sequence, with what to add to a name of a piece.
    pub fn chunks(
        &mut self,
        name: &str,
        value: Value,
        n: u64,
    ) -> Result<SmallVec<[(String, Value); 1]>, ModelError> {
        if n == 1 {
            return Ok(smallvec![(String::new(), value)]);
        }
        let size = self.ty(value).shape.get(1).copied().unwrap_or(1);
        if n > size {
            let (field, found) = ("chunks".to_string(), n.to_string());
            let expected = format!("at most the {size} tokens of a sequence");
            return Err(self.error("chunks", Problem::Range { field, found, expected }));
        }
        let start = |i: u64| (u128::from(size) * u128::from(i) / u128::from(n)) as u64;
        (0..n)
            .map(|i| {
                let op = SliceDim { dim: 1, start: start(i), len: start(i + 1) - start(i) };
                let part = format!(".{i}");
                let piece = self.op(&format!("{name}{part}"), op, &[value])?;
                Ok((part, piece))
            })
            .collect()
    }

    /// What to call the module at hand in a message.
    pub fn title(&self) -> String {
        if self.scope_path.is_empty() { self.path.clone() } else { self.name("") }
    }

    /// Pins a value of the residual stream.
    pub fn pin_stream(&mut self, value: Value) -> Result<(), ModelError> {
        let ty = self.ty(value);
        let mut sharding = Sharding::replicated(ty.ndim());
        if ty.ndim() > 1 {
            sharding.dims[0] = DimLayout::over(self.layout.data.iter().copied());
        }
        if ty.ndim() > 2 && self.sequence_parallel {
            let size = ty.shape[1];
            if !size.is_multiple_of(self.tp.size) {
                let problem = Problem::Indivisible {
                    tensor: self.builder.graph.values[value].name.clone(),
                    what: "dim 1 (sequence)".to_string(),
                    size,
                    axis: self.tp.name.clone(),
                    axis_size: self.tp.size,
                    fix: "use a sequence that it divides, or `sequence_parallel: false`"
                        .to_string(),
                };
                return Err(problem.at(At::Path("sequence".into())));
            }
            sharding.dims[1] = self.tp.cut();
        }
        let sharding = sharding.without_unit_axes(&self.layout.mesh);
        self.builder.pin(value, sharding);
        Ok(())
    }

    /// Refuses a number of heads that the tensor-parallel axis does not divide.
    pub fn check_tp(&self, field: &str, what: &str, size: u64) -> Result<(), ModelError> {
        if size.is_multiple_of(self.tp.size) {
            return Ok(());
        }
        let (axis, axis_size) = (self.tp.name.clone(), self.tp.size);
        let problem = Problem::Indivisible {
            tensor: self.title(),
            what: what.to_string(),
            size,
            fix: format!(
                "use a size that {axis_size} divides, or a mesh whose `{axis}` divides {size}"
            ),
            axis,
            axis_size,
        };
        Err(self.error(field, problem))
    }
}
