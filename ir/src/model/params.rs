//! Parameters: one leaf in storage layout, one cast in `Prepare`, one gather in `Forward`.
//!
//! ```text
//! weight          f32  [tp.dp, _]   master, in storage layout
//! weight.compute  bf16 [tp.dp, _]   state, cast in `Prepare`; the master itself if types agree
//! weight.full     bf16 [tp, _]      reshard in `Forward`; what modules read
//! ```

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::elaborate::Cx;
use super::error::{At, ModelError, Problem, nearest};
use super::pattern::NamePattern;
use super::range::too_large;
use super::schema::{Model, ParamOptions, PlacementSpec, Placements};
use crate::graph::{Def, Init, Param, Section, Store};
use crate::ops::{Cast, Reshard};
use crate::placement::{self, DimLayout, Placement, Sharding};
use crate::{TensorType, Value};

/// The initial values of a parameter.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// The distribution.
    pub init: Init,
    /// The field of the module at hand that says so; `None` if it follows from other things.
    pub field: Option<&'static str>,
}

impl Start {
    /// As `field` of the module says, and otherwise as `default`.
    pub fn of(field: &'static str, init: Option<Init>, default: impl Into<Start>) -> Start {
        init.map_or_else(|| default.into(), |init| Start { init, field: Some(field) })
    }
}

impl From<Init> for Start {
    fn from(init: Init) -> Start {
        Start { init, field: None }
    }
}

/// A parameter as its module wants it.
pub struct ParamSpec<'s> {
    /// Local name: `weight`.
    pub name: &'s str,
    /// Global shape.
    pub shape: &'s [u64],
    /// How it starts.
    pub start: Start,
    /// Layout in compute; `None` is replicated.
    pub compute: Option<Sharding>,
    /// Layout in storage before FSDP; `None` is that of compute.
    pub storage: Option<Sharding>,
    /// The user's options in the module, with the field that holds them.
    pub options: Option<(&'s str, &'s ParamOptions)>,
}

impl<'s> ParamSpec<'s> {
    /// A replicated parameter.
    pub fn new(name: &'s str, shape: &'s [u64], start: impl Into<Start>) -> ParamSpec<'s> {
        let start = start.into();
        ParamSpec { name, shape, start, compute: None, storage: None, options: None }
    }

    /// Cuts dimension `dim` in compute.
    pub fn cut(mut self, dim: usize, layout: DimLayout) -> ParamSpec<'s> {
        let whole = Sharding::replicated(self.shape.len());
        self.compute = Some(self.compute.take().unwrap_or(whole).with_dim(dim, layout));
        self
    }
}

impl Cx<'_> {
    /// Declares a parameter of the module at hand, and returns it as modules read it.
    pub fn param(&mut self, spec: ParamSpec<'_>) -> Result<Value, ModelError> {
        let name = self.param_name(spec.name);
        if self.params.contains_key(&name) {
            return Err(self.error("name", Problem::DuplicateParam { name }));
        }
        let owner = self.tied.get(name.as_str()).and_then(|it| self.params.get(*it));
        if let Some(&index) = owner {
            return self.tie(index, name, &spec);
        }
        let ndim = spec.shape.len();
        if !TensorType::fits(spec.shape) {
            return Err(self.error("", too_large(&name, spec.shape)));
        }
        let mut compute = spec.compute.unwrap_or_else(|| Sharding::replicated(ndim));
        let mut storage = spec.storage.unwrap_or_else(|| compute.clone());
        let mut fsdp_dim = self.model.fsdp.dim;
        let mut fsdp_dim_at = At::Path("fsdp.dim".into());
        let mut dtype = self.model.precision.storage;
        let (mut init, mut decay, mut trainable) = (spec.start.init, ndim > 1, true);
        let patterns = &self.patterns;
        let matches = |patterns: &[NamePattern]| patterns.iter().any(|it| it.matches(&name));
        decay = (decay || matches(&patterns.decay)) && !matches(&patterns.no_decay);
        trainable &= !matches(&patterns.frozen);
        let global = patterns.parameters.iter().zip(&self.model.parameters.0);
        let global = global.filter(|it| it.0.matches(&name));
        let global = global.map(|(pattern, (_, it))| (parameters_at(pattern), it));
        let local = spec.options.map(|(field, it)| (self.here(field), it));
        let mut explicit = false;
        for (place, options) in local.into_iter().chain(global) {
            let at = |field: &str| At::Path(format!("{place}.{field}"));
            init = options.init.unwrap_or(init);
            dtype = options.dtype.unwrap_or(dtype);
            if let Some(dim) = options.fsdp_dim {
                fsdp_dim = dim;
                fsdp_dim_at = at("fsdp_dim");
            }
            decay = options.decay.unwrap_or(decay);
            trainable = options.trainable.unwrap_or(trainable);
            if let Some(placements) = &options.placements {
                let partial = |it: &&PlacementSpec| matches!(it, PlacementSpec::Partial(_));
                if let Some((axis, _)) = placements.iter().find(|it| partial(&it.1)) {
                    let (tensor, axis) = (name.clone(), axis.clone());
                    let at = at(&format!("placements[\"{axis}\"]"));
                    return Err(Problem::PartialParam { tensor, axis }.at(at));
                }
                storage = self.placements(&name, placements, ndim, &at("placements"))?;
                explicit = placements.keys().any(|it| self.layout.fsdp_names.contains(it));
                compute =
                    storage.without_partial().without(self.layout.fsdp.iter().copied().collect());
            }
        }
        if !dtype.is_float() {
            let (field, found) = (format!("dtype of `{name}`"), dtype.to_string());
            return Err(
                self.error("", Problem::Range { field, found, expected: "f32 or bf16".into() })
            );
        }
        if ndim > 1 && fsdp_dim >= ndim {
            let field = format!("the FSDP dimension of `{name}`");
            let expected = format!("below {ndim}, the number of its dimensions");
            let problem = Problem::Range { field, found: fsdp_dim.to_string(), expected };
            return Err(problem.at(fsdp_dim_at));
        }
        if let Some((field, ParamOptions { fsdp_dim: Some(_), .. })) = spec.options
            && (explicit || ndim < 2)
        {
            let (dim, why) = ("fsdp_dim".to_string(), FSDP_DIM.to_string());
            let problem = Problem::NoEffect { field: dim, why };
            return Err(self.error(&format!("{field}.fsdp_dim"), problem));
        }
        if !explicit && ndim > 0 {
            let dim = fsdp_dim.min(ndim - 1);
            storage = placement::fsdp(&storage, dim, self.layout.fsdp.iter().copied());
        }
        let label = std::mem::take(&mut storage);
        storage = label.without_unit_axes(&self.layout.mesh);
        compute = compute.without_unit_axes(&self.layout.mesh);
        let reduce_dtype = self.model.precision.reduce;
        let master = self.builder.leaf(&name, TensorType::new(dtype, spec.shape), Def::Param);
        self.builder.pin(master, storage.clone());
        let stored = storage.clone();
        let in_compute = self.in_compute(master, &name, storage)?;
        let full = Reshard { reduce: Some(reduce_dtype) };
        let full = self.builder.op(&format!("{name}.full"), full, &[in_compute]);
        let full = full.map_err(|it| self.error("", Problem::Build(it)))?;
        self.builder.pin(full, compute);
        self.params.insert(name, self.builder.graph.params.len());
        let scope = self.scope();
        self.builder.graph.params.push(Param {
            value: master,
            compute: in_compute,
            full,
            label: Some(label).filter(|it| *it != stored),
            init,
            decay,
            trainable,
            placed: explicit,
            reduce_dtype,
            scope,
            aliases: Vec::new(),
            grad: None,
        });
        Ok(full)
    }

    /// The master weight in compute type.
    fn in_compute(
        &mut self,
        master: Value,
        name: &str,
        storage: Sharding,
    ) -> Result<Value, ModelError> {
        let to = self.model.precision.compute;
        let ty = self.ty(master).with_dtype(to);
        if ty == *self.ty(master) {
            return Ok(master);
        }
        let state = self.builder.leaf(&format!("{name}.compute"), ty, Def::State);
        self.builder.pin(state, storage.clone());
        let section = std::mem::replace(&mut self.builder.section, Section::Prepare);
        let value = self.builder.op(&format!("{name}.cast"), Cast { to }, &[master]);
        let value = value.map_err(|it| self.error("", Problem::Build(it)))?;
        self.builder.pin(value, storage);
        self.builder.section = section;
        self.builder.graph.stores.push(Store { state, value, section: Section::Prepare });
        Ok(state)
    }

    /// Reads the parameter `index` under its other name `alias`, for which a module declares `spec`.
    fn tie(
        &mut self,
        index: usize,
        alias: String,
        spec: &ParamSpec<'_>,
    ) -> Result<Value, ModelError> {
        let param = &self.builder.graph.params[index];
        let (full, owner) = (param.full, &self.builder.graph.values[param.value]);
        let name = owner.name.clone();
        if owner.ty.shape.as_slice() != spec.shape {
            let (alias_shape, shape) = (spec.shape.to_vec(), owner.ty.shape.to_vec());
            return Err(self.error("", Problem::Tied { alias, alias_shape, name, shape }));
        }
        if let Some((at, options)) = spec.options
            && *options != ParamOptions::default()
        {
            let field = "the options of its module".to_string();
            return Err(self.error(at, Problem::TiedOption { field, pattern: alias, name }));
        }
        if let Start { init, field: Some(field) } = spec.start
            && init != param.init
        {
            let why = format!("`{alias}` is tied to `{name}`, and starts as that does");
            return Err(self.error(field, Problem::NoEffect { field: field.to_string(), why }));
        }
        self.params.insert(alias.clone(), index);
        self.builder.graph.params[index].aliases.push(alias);
        Ok(full)
    }

    /// Reads placements by axis; axes that this mesh lacks cut nothing. Axes of size 1 are in the result if that is the
    /// same layout: a split that lines up with other cuts where they are larger need not do so here.
    pub(super) fn placements(
        &self,
        tensor: &str,
        placements: &Placements,
        ndim: usize,
        at: &At,
    ) -> Result<Sharding, ModelError> {
        for name in placements.keys() {
            if !self.layout.names.contains(name) {
                let known = self.layout.names.clone();
                return Err(Problem::UnknownAxis { name: name.clone(), known }.at(at.clone()));
            }
        }
        let mesh = &self.layout.mesh;
        let read = |fits: fn(Placement, u32) -> bool| {
            let axes = mesh.user_axes().into_iter();
            let torch = axes.map(|(name, size)| match placements.get(name) {
                Some(&it) if fits(it.into(), size) => it.into(),
                _ => Placement::Replicate,
            });
            Sharding::from_torch(&torch.collect::<Vec<_>>(), ndim, mesh)
        };
        let plain = read(|_, size| size > 1).map_err(|source| {
            Problem::Placement { tensor: tensor.to_string(), source }.at(at.clone())
        })?;
        let labelled = read(|it, size| size > 1 || !matches!(it, Placement::Partial(_)));
        Ok(labelled.ok().filter(|it| it.without_unit_axes(mesh) == plain).unwrap_or(plain))
    }
}

/// The parameter that each alias stands for; chains are followed.
pub(super) fn ties(model: &Model) -> Result<FxHashMap<&str, &str>, ModelError> {
    let fail = |i: usize, why: String| {
        let problem = Problem::Tie { alias: model.tied[i].0.clone(), why };
        Err(problem.at(At::Path(format!("tied[{i}][0]"))))
    };
    let mut direct: FxHashMap<&str, &str> = FxHashMap::default();
    for (i, (alias, name)) in model.tied.iter().enumerate() {
        if alias == name {
            return fail(i, "is tied to itself".to_string());
        }
        if let Some(first) = direct.insert(alias, name) {
            return fail(i, format!("is tied twice, to `{first}` and to `{name}`"));
        }
    }
    let mut res = FxHashMap::default();
    for (i, (alias, name)) in model.tied.iter().enumerate() {
        let mut chain = vec![alias.as_str(), name.as_str()];
        while let Some(&next) = direct.get(chain[chain.len() - 1]) {
            let is_cycle = chain.contains(&next);
            chain.push(next);
            if is_cycle {
                let names: Vec<String> = chain.iter().map(|it| format!("`{it}`")).collect();
                return fail(
                    i,
                    format!("leads to no parameter, but in a circle: {}", names.join(" -> ")),
                );
            }
        }
        res.insert(alias.as_str(), chain[chain.len() - 1]);
    }
    Ok(res)
}

/// The patterns of a model, by field.
pub(super) struct Patterns {
    decay: Vec<NamePattern>,
    no_decay: Vec<NamePattern>,
    frozen: Vec<NamePattern>,
    /// Patterns of `parameters`, in the order of the file.
    parameters: Vec<NamePattern>,
}

impl Patterns {
    /// Reads them.
    pub(super) fn of(model: &Model) -> Result<Patterns, ModelError> {
        let list = |field: &str, patterns: &[String]| {
            let read = |(i, it): (usize, &String)| pattern(it, || format!("{field}[{i}]"));
            patterns.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()
        };
        let named = model.parameters.0.iter();
        let named = named.map(|(it, _)| pattern(it, || format!("parameters[\"{it}\"]")));
        Ok(Patterns {
            decay: list("decay", &model.decay)?,
            no_decay: list("no_decay", &model.no_decay)?,
            frozen: list("frozen", &model.frozen)?,
            parameters: named.collect::<Result<_, _>>()?,
        })
    }
}

fn pattern(text: &str, at: impl FnOnce() -> String) -> Result<NamePattern, ModelError> {
    text.parse().map_err(|it| Problem::Pattern(it).at(At::Path(at())))
}

/// The place of a pattern's options.
fn parameters_at(pattern: &NamePattern) -> At {
    At::Path(format!("parameters[\"{pattern}\"]"))
}

/// Refuses a model in which no parameter is trained.
pub(super) fn check_trained(cx: &Cx<'_>) -> Result<(), ModelError> {
    let params = &cx.builder.graph.params;
    if params.is_empty() || params.iter().any(|it| it.trainable) {
        return Ok(());
    }
    let field = if cx.model.frozen.is_empty() { "parameters" } else { "frozen" };
    Err(Problem::NothingTrained.at(At::Path(field.into())))
}

/// Refuses patterns and options that match parameters and change none of them.
pub(super) fn check_effects(cx: &Cx<'_>) -> Result<(), ModelError> {
    let graph = &*cx.builder.graph;
    let matched = |pattern: &NamePattern| -> Vec<&Param> {
        let params = graph.params.iter();
        params.filter(|it| pattern.matches(&graph.values[it.value].name)).collect()
    };
    let fail = |field: &str, why: String, at: String| {
        let field = field.to_string();
        Err(Problem::NoEffect { field, why }.at(At::Path(at)))
    };
    for (i, pattern) in cx.patterns.decay.iter().enumerate() {
        let excluded = |it: &&Param| {
            cx.patterns.no_decay.iter().any(|no| no.matches(&graph.values[it.value].name))
        };
        if matched(pattern).iter().all(excluded) {
            let why = format!("`no_decay` matches each parameter that `{pattern}` does, and wins");
            return fail("decay", why, format!("decay[{i}]"));
        }
    }
    for (pattern, (_, options)) in cx.patterns.parameters.iter().zip(&cx.model.parameters.0) {
        if options.fsdp_dim.is_some()
            && matched(pattern).iter().all(|it| it.placed || graph.ty(it.value).ndim() < 2)
        {
            let at = format!("parameters[\"{pattern}\"].fsdp_dim");
            return fail("fsdp_dim", FSDP_DIM.to_string(), at);
        }
    }
    Ok(())
}

/// The reason against `fsdp_dim` where it changes nothing.
const FSDP_DIM: &str = "FSDP cuts the only dimension of a vector, and `placements` that name an axis of FSDP say \
                        which dimension it cuts";

/// Every pattern and every name that is tied must mean some parameter, or it is a misspelling.
pub(super) fn check_patterns(cx: &Cx<'_>) -> Result<(), ModelError> {
    for (i, tie) in cx.model.tied.iter().enumerate() {
        check_tie(cx, i, tie)?;
    }
    let patterns = &cx.patterns;
    let lists = [
        ("decay", &patterns.decay),
        ("no_decay", &patterns.no_decay),
        ("frozen", &patterns.frozen),
    ];
    for (field, patterns) in lists {
        for (i, pattern) in patterns.iter().enumerate() {
            check_pattern(cx, field, At::Path(format!("{field}[{i}]")), pattern)?;
        }
    }
    for pattern in &patterns.parameters {
        check_pattern(cx, "parameters", parameters_at(pattern), pattern)?;
    }
    Ok(())
}

fn check_pattern(
    cx: &Cx<'_>,
    field: &str,
    at: At,
    pattern: &NamePattern,
) -> Result<(), ModelError> {
    let graph = &*cx.builder.graph;
    let names = || graph.params.iter().map(|it| &graph.values[it.value].name);
    if names().any(|it| pattern.matches(it)) {
        return Ok(());
    }
    let problem = match cx.model.tied.iter().find(|it| pattern.matches(&it.0)) {
        Some((alias, _)) => {
            let name = cx.tied[alias.as_str()].to_string();
            Problem::TiedOption { field: field.to_string(), pattern: pattern.to_string(), name }
        }
        None => {
            let known: Vec<String> = names().cloned().collect();
            let nearest = nearest(pattern.as_str(), &known).map(str::to_string);
            Problem::NoMatch { field: field.to_string(), pattern: pattern.to_string(), nearest }
        }
    };
    Err(problem.at(at))
}

/// Both names of a tie are parameters that modules declare, and the module of the alias comes later.
fn check_tie(cx: &Cx<'_>, i: usize, tie: &(String, String)) -> Result<(), ModelError> {
    let (alias, name) = tie;
    for (side, written, other) in [(0, alias, name), (1, name, alias)] {
        if cx.params.contains_key(written) {
            continue;
        }
        let known = cx.params.keys().filter(|it| *it != other).cloned();
        let known: Vec<String> = known.collect::<BTreeSet<_>>().into_iter().collect();
        let (field, pattern) = ("tied".to_string(), written.clone());
        let nearest = nearest(written, &known).map(str::to_string);
        let problem = Problem::NoMatch { field, pattern, nearest };
        return Err(problem.at(At::Path(format!("tied[{i}][{side}]"))));
    }
    let owner = cx.tied[alias.as_str()];
    if cx.params[alias] == cx.params[owner] {
        return Ok(());
    }
    let why = format!(
        "is declared before `{owner}`, and of tied names the first is the parameter: write \
         (\"{owner}\", \"{alias}\")"
    );
    Err(Problem::Tie { alias: alias.clone(), why }.at(At::Path(format!("tied[{i}][0]"))))
}
