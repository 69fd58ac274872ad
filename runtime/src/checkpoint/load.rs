//! Loading a checkpoint into a session, whatever mesh it was saved on, and whoever saved it.
//!
//! First all is compared: what the plan needs with what is there. All that does not
//! agree is one error. Then ranks read the boxes that they hold, what several hold by one of them, which
//! gives it to the others over the plan's communicators; in this order:
//!
//! ```text
//! parameters, moments    as they lie in the files
//! `prepare`              makes what computes from master weights
//! all other states       over that: codes and scales are the bytes that were saved
//! ```
//!
//! A checkpoint of PyTorch has no `planc.*`: then the step is that of its optimizer.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use checkpoint::hf::convert::{convert, effect};
use checkpoint::pickle::Value;
use checkpoint::save::{DATA, DIGESTS, Number, Position, hyper_parameters, schedule_numbers};
use checkpoint::{Checkpoint, StoredTensor, StoredType, is_count, overlap};
use ir::DType;
use ir::checkpoint::{CheckpointLayout, Entry, Kind, Source};
use ir::model::NamePattern;
use ir::placement::{AxisSet, Chunk, Coord, LocalBox, Mesh, Sharding};
use ir::plan::{Buffer, Comm, Plan};
use ir::types::TensorType;

use super::boxes::{Staging, write_box};
use crate::error::{LoadProblem, RunError};
use crate::session::{Rank, Session};

/// What to load, and what may differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// A checkpoint, or a folder with `latest`.
    pub path: PathBuf,
    /// Keys of the plan that need not be in the checkpoint.
    pub allow_missing: Vec<NamePattern>,
    /// Keys of the checkpoint that the plan need not have.
    pub allow_unexpected: Vec<NamePattern>,
    /// Whether floating-point numbers may be of another type than the plan's.
    pub cast: bool,
}

/// What was loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadReport {
    /// The checkpoint.
    pub path: PathBuf,
    /// Steps that were done.
    pub step: u64,
    /// The seed that training goes on with.
    pub seed: u64,
    /// Bytes that ranks of this process read.
    pub bytes: u64,
    /// The most memory that they took for it, besides what they hold.
    pub extra_memory: u64,
    /// How long it took.
    pub seconds: f64,
    /// What the user should know, a line each.
    pub warnings: Vec<String>,
}

/// A checkpoint that fits a plan.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// What is saved from here on: what the plan has, and what was kept.
    pub layout: CheckpointLayout,
    /// Where training goes on. The seed is the checkpoint's, if it has one.
    pub step: u64,
    /// The next sample.
    pub sample: u64,
    /// True if the last step was finite.
    finite: bool,
    /// The seed that it was saved with.
    pub seed: Option<u64>,
    /// What the user should know.
    pub warnings: Vec<String>,
    source: Arc<Files>,
}

/// What ranks read from.
#[derive(Debug)]
struct Files {
    checkpoint: Checkpoint,
    /// For each entry of the layout, the keys of its tensor; none if it is not loaded.
    keys: Vec<Vec<String>>,
}

/// What is loaded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// What `prepare` reads, or does not touch.
    BeforePrepare,
    /// What it writes.
    AfterPrepare,
}

impl Part {
    fn of(entry: &Entry) -> Part {
        match entry.kind {
            Kind::State { .. } => Part::AfterPrepare,
            Kind::Param | Kind::Optimizer { .. } | Kind::Kept => Part::BeforePrepare,
        }
    }
}

/// How many bytes ahead of what is read the system is told.
const AHEAD: u64 = 64 << 20;

/// Two numbers of each rank.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    bytes: u64,
    extra: u64,
}

impl Loaded {
    /// Opens a checkpoint and compares it with a plan.
    pub(crate) fn open(plan: &Plan, options: &LoadOptions) -> Result<Loaded, RunError> {
        let checkpoint = Checkpoint::open(&options.path)?;
        let mut matching = Matching {
            options,
            checkpoint: &checkpoint,
            used: BTreeSet::new(),
            problems: Vec::new(),
            warnings: checkpoint.warnings().to_vec(),
        };
        let mut layout = CheckpointLayout::to_save(plan)?;
        let mut keys = matching.entries(plan, &layout.entries);
        let steps = matching.steps(&layout)?;
        for key in matching.kept(plan, &mut layout) {
            keys.push(vec![key]);
        }
        matching.numbers();
        matching.unexpected();
        matching.without_optimizer();
        let params = || layout.entries.iter().zip(&keys).filter(|it| it.0.kind == Kind::Param);
        let first = params().next().map(|it| it.0.key.clone());
        if let Some(expected) = first.filter(|_| params().all(|it| it.1.is_empty())) {
            if let Some((found, _)) = checkpoint.tensors().next()
                && !matching.problems.is_empty()
            {
                let found = found.to_string();
                matching.problems.insert(0, LoadProblem::Foreign { found, expected });
            }
            let why = "no parameter at all is in the checkpoint: all keep their initial values";
            matching.warnings.push(why.to_string());
        }
        let Matching { problems, warnings, .. } = matching;
        if !problems.is_empty() {
            return Err(RunError::LoadMismatch { path: checkpoint.path().to_path_buf(), problems });
        }
        checkpoint.files().try_for_each(|it| checkpoint.check_save(it))?;
        keys.iter().flatten().try_for_each(|it| checkpoint.check_cover(it))?;
        let mut res = Loaded {
            layout,
            step: 0,
            sample: 0,
            finite: true,
            seed: None,
            warnings,
            source: Arc::new(Files { checkpoint, keys }),
        };
        // As it was saved, until a run knows better.
        let data = res.source.object(DATA)?;
        res.layout.data = data.as_ref().and_then(Value::as_str).map(str::to_string);
        res.position(&steps)?;
        res.compare_model()?;
        res.compare_schedule()?;
        res.compare_groups()?;
        Ok(res)
    }

    /// The folder of the checkpoint.
    pub(crate) fn path(&self) -> &Path {
        self.source.checkpoint.path()
    }

    /// Where training goes on.
    fn position(&mut self, steps: &[u64]) -> Result<(), RunError> {
        let batch = self.layout.run.global_batch.max(1);
        if let (Some(min), Some(max)) = (steps.iter().min(), steps.iter().max())
            && min != max
        {
            self.warnings.push(format!(
                "the optimizer has done {min} to {max} steps, depending on the parameter; this plan counts \
                 the steps of all together, from {max}"
            ));
        }
        let step = self.source.count("planc.step")?;
        self.step = step.or(steps.iter().max().copied()).unwrap_or(0);
        let sample = self.source.count("planc.sample")?;
        self.sample = sample.unwrap_or_else(|| self.step.saturating_mul(batch));
        self.seed = self.source.integer("planc.seed")?;
        self.finite = self.source.count("planc.finite")? != Some(0);
        if !self.finite {
            self.warnings.push(format!(
                "the loss or the gradients of step {} were not finite, so that it was skipped; its weights are those of \
                 the step before. If steps go on being skipped, load an older checkpoint",
                self.step
            ));
        }
        if let Some(next) =
            self.sample.checked_next_multiple_of(batch).filter(|&it| it != self.sample)
        {
            self.warnings.push(format!(
                "the next sample is {}, which batches of {batch} do not begin at; going on with sample {next}",
                self.sample
            ));
            self.sample = next;
        }
        Ok(())
    }

    /// Warns if another model saved the checkpoint. Tensors with the same names and shapes are loaded.
    fn compare_model(&mut self) -> Result<(), RunError> {
        let saved = self.source.object(&format!("{DIGESTS}model"))?;
        let saved = saved.as_ref().and_then(Value::as_str);
        if let (Some(saved), Some(now)) =
            (saved, self.layout.digests.map(|it| it.model.to_string()))
            && saved != now
        {
            self.warnings.push(format!(
                "another model saved this checkpoint: its digest is {saved}, and that of this plan's model is \
                 {now}. Layers, numbers of the optimizer, batch or schedule were changed since (a change of the \
                 mesh changes no digest). What has the same names and shapes is loaded"
            ));
        }
        Ok(())
    }

    /// Warns of a schedule that is not the plan's.
    fn compare_schedule(&mut self) -> Result<(), RunError> {
        let mut differ = Vec::new();
        for (name, now) in schedule_numbers(&self.layout) {
            let key = format!("planc.schedule.{name}");
            let saved = match now {
                Number::Int(_) => self.source.integer(&key)?.map(Number::Int),
                Number::Float(_) => self.source.float(&key)?.map(Number::Float),
            };
            if let Some(saved) = saved.filter(|&it| it != now) {
                let text = |it: Number| match it {
                    Number::Int(it) => it.to_string(),
                    Number::Float(it) => format!("{it:?}"),
                };
                differ.push(format!("{name} was {} and is {}", text(saved), text(now)));
            }
        }
        if !differ.is_empty() {
            self.warnings.push(format!(
                "the schedule of the learning rate is another than the checkpoint's: {}; the plan's is used",
                differ.join(", ")
            ));
        }
        Ok(())
    }

    /// Warns of hyper-parameters that are not the plan's.
    fn compare_groups(&mut self) -> Result<(), RunError> {
        let groups = self.source.groups()?;
        let mut differ: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for group in &self.layout.groups {
            for (name, now) in hyper_parameters(group, 0.0) {
                if !["betas", "eps", "weight_decay", "momentum"].contains(&name) {
                    continue;
                }
                for param in &group.params {
                    let by = groups.get(param.as_str()).map_or(param.clone(), |it| it.to_string());
                    let key = format!("optim.param_groups.{by}.{name}");
                    let Some(saved) = self.source.object(&key)? else { continue };
                    if !same(&saved, &now) {
                        let text = format!("{name} was {} and is {}", text(&saved), text(&now));
                        differ.entry(text).or_default().push(param);
                    }
                }
            }
        }
        for (text, params) in differ {
            let more = match params.len() - 1 {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            self.warnings.push(format!("{text} for `{}`{more}; the plan's is used", params[0]));
        }
        Ok(())
    }

    /// Leaves out of the layout what the checkpoint does not have; its keys.
    pub(crate) fn leave_out_what_is_not_there(&mut self) -> Vec<String> {
        let keys = &mut Arc::get_mut(&mut self.source).expect("nobody reads yet").keys;
        let mut here = keys.iter().map(|it| !it.is_empty());
        let mut res = Vec::new();
        self.layout.entries.retain(|it| {
            let here = here.next().expect("one for each entry");
            if !here {
                res.push(it.key.clone());
            }
            here
        });
        keys.retain(|it| !it.is_empty());
        res
    }

    /// The type in which an entry that is there is stored.
    pub(crate) fn stored_type(&self, entry: usize) -> StoredType {
        let Files { checkpoint, keys } = &*self.source;
        checkpoint.tensor(&keys[entry][0]).expect("it was found there").dtype
    }

    /// Bytes of a box of an entry that is there, by the file that they are read from.
    pub(crate) fn reads<'a>(
        &'a self,
        entry: usize,
        chunk: &'a Chunk,
    ) -> impl Iterator<Item = (&'a str, u64)> {
        let Files { checkpoint, keys } = &*self.source;
        let stored = checkpoint.tensor(&keys[entry][0]).expect("it was found there");
        stored.chunks.iter().filter_map(move |it| {
            let common = overlap(&it.chunk, chunk)?;
            Some((checkpoint.file_name(it.item.file), volume(&common) * stored.dtype.bytes()))
        })
    }

    /// Reads a box of an entry that is there, in the plan's type.
    pub(crate) fn read(
        &self,
        entry: usize,
        chunk: &Chunk,
        out: &mut [u8],
        raw: &mut Vec<u8>,
    ) -> Result<(), RunError> {
        let dtype = self.layout.entries[entry].ty.dtype;
        self.source.read(entry, chunk, (dtype, out), raw)
    }

    /// Fills the buffers of the ranks here; see the [module docs](self).
    pub(crate) fn apply(&self, session: &Session, seed: u64) -> Result<LoadReport, RunError> {
        let began = Instant::now();
        let layout = Arc::new(self.layout.clone());
        let read = |part: Part| {
            let (layout, source) = (layout.clone(), self.source.clone());
            session.on_all(move |rank| rank.load(&layout, &source, part))
        };
        let first = read(Part::BeforePrepare)?;
        session.prepare()?;
        let rest = read(Part::AfterPrepare)?;
        let costs = first.iter().zip(&rest);
        let (bytes, extra_memory) = costs.fold((0, 0), |(bytes, extra), (a, b)| {
            (bytes + a.bytes + b.bytes, extra + a.extra.max(b.extra))
        });
        Ok(LoadReport {
            path: self.path().to_path_buf(),
            step: self.step,
            seed,
            bytes,
            extra_memory,
            seconds: began.elapsed().as_secs_f64(),
            warnings: self.warnings.clone(),
        })
    }

    /// Where a run that loaded this is.
    pub(crate) fn at(&self, seed: u64) -> Position {
        Position { step: self.step, sample: self.sample, seed, finite: self.finite }
    }
}

/// Loads a checkpoint into a session.
pub fn load(session: &Session, options: &LoadOptions) -> Result<LoadReport, RunError> {
    let loaded = Loaded::open(session.plan(), options)?;
    let seed = loaded.seed.unwrap_or(session.plan().run.seed);
    loaded.apply(session, seed)
}

/// A plan and a checkpoint, compared.
struct Matching<'a> {
    options: &'a LoadOptions,
    checkpoint: &'a Checkpoint,
    /// Keys of the checkpoint that have a use.
    used: BTreeSet<String>,
    problems: Vec<LoadProblem>,
    warnings: Vec<String>,
}

impl Matching<'_> {
    /// The keys that each entry is loaded from.
    fn entries(&mut self, plan: &Plan, entries: &[Entry]) -> Vec<Vec<String>> {
        let aliases: BTreeMap<&str, &Vec<String>> = plan
            .params
            .iter()
            .map(|it| (plan.buffers[it.buffer].name.as_str(), &it.aliases))
            .collect();
        let mut res: Vec<Vec<String>> = Vec::new();
        // States that are of no use, with those that they belong to.
        let mut unfit: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for entry in entries {
            let mut names = vec![entry.key.clone()];
            names.extend(entry.aliases.iter().map(|it| it.0.clone()));
            if let Kind::Optimizer { param, name } = &entry.kind {
                let others = aliases[param.as_str()].iter();
                names.extend(others.map(|it| format!("optim.state.{it}.{name}")));
            }
            names.retain(|it| self.checkpoint.tensor(it).is_some());
            let found = names;
            self.used.extend(found.iter().cloned());
            if let Kind::State { together } = entry.kind {
                if let Some(why) = self.unfit(entry, found.first()) {
                    unfit.entry(together).or_default().push(why);
                }
            } else if found.is_empty() {
                let key = entry.key.clone();
                if !allows(&self.options.allow_missing, &key) {
                    self.problems.push(LoadProblem::Missing { key });
                }
            }
            for key in &found {
                if !matches!(entry.kind, Kind::State { .. }) {
                    self.check(entry, key);
                }
            }
            res.push(found);
        }
        for (entry, keys) in entries.iter().zip(&mut res) {
            if let Kind::State { together } = entry.kind
                && unfit.contains_key(&together)
            {
                keys.clear();
            }
        }
        let unfit: Vec<String> = unfit.into_values().flatten().collect();
        if let Some(first) = unfit.first() {
            let more = match unfit.len() - 1 {
                0 => String::new(),
                n => format!(" (and {n} more)"),
            };
            self.warnings.push(format!(
                "{first}{more}: saved with another recipe or for another mesh, or by another program; codes \
                 and scales are made again from the master weights, and histories begin anew"
            ));
        }
        res
    }

    /// Why a state of the plan cannot be what was saved.
    fn unfit(&self, entry: &Entry, key: Option<&String>) -> Option<String> {
        let Some(stored) = key.and_then(|it| self.checkpoint.tensor(it)) else {
            return Some(format!("`{}` is not in the checkpoint", entry.key));
        };
        let same = stored.shape[..] == entry.ty.shape[..]
            && stored.dtype == StoredType::from(entry.ty.dtype);
        (!same).then(|| {
            format!(
                "`{}` is {}{:?} in the checkpoint, and {}{:?} in the plan",
                entry.key,
                stored.dtype,
                stored.shape,
                StoredType::from(entry.ty.dtype),
                &entry.ty.shape[..]
            )
        })
    }

    /// Shape and type of what is loaded.
    fn check(&mut self, entry: &Entry, key: &str) {
        let Some(stored) = self.checkpoint.tensor(key) else { return };
        let key = key.to_string();
        if stored.shape[..] != entry.ty.shape[..] {
            let (found, expected) = (stored.shape.clone(), entry.ty.shape.to_vec());
            self.problems.push(LoadProblem::Shape { key, found, expected });
            return;
        }
        let (found, expected) = (stored.dtype, StoredType::from(entry.ty.dtype));
        let can_cast = effect(found, expected).is_some();
        if found != expected && !(self.options.cast && can_cast) {
            self.problems.push(LoadProblem::Type { key, found, expected, can_cast });
        }
    }

    /// The steps that the optimizer has counted for the parameters of the plan.
    fn steps(&mut self, layout: &CheckpointLayout) -> Result<Vec<u64>, RunError> {
        let mut res = Vec::new();
        let mut last: Option<(checkpoint::metadata::Item, u64)> = None;
        for param in layout.groups.iter().flat_map(|it| &it.params) {
            let key = format!("optim.state.{param}.step");
            let Some(stored) = self.checkpoint.tensor(&key) else { continue };
            self.used.insert(key.clone());
            // Most often all are one number, stored once.
            let item = stored.chunks.first().map(|it| it.item);
            if let Some((_, step)) = last.filter(|it| Some(it.0) == item) {
                res.push(step);
                continue;
            }
            let step = count(self.checkpoint, &key, stored)?;
            last = item.map(|it| (it, step));
            res.push(step);
        }
        Ok(res)
    }

    /// State of the optimizer of parameters that the plan has and does not train, which is added to the
    /// layout; its keys.
    fn kept(&mut self, plan: &Plan, layout: &mut CheckpointLayout) -> Vec<String> {
        let mut frozen: BTreeMap<&str, usize> = BTreeMap::new();
        for (i, param) in plan.params.iter().enumerate() {
            let name = &plan.buffers[param.buffer].name;
            if !layout.groups.iter().any(|it| it.params.contains(name)) {
                let names = std::iter::once(name).chain(&param.aliases);
                frozen.extend(names.map(|it| (it.as_str(), i)));
            }
        }
        let mut res = Vec::new();
        for (key, stored) in self.checkpoint.tensors() {
            let Some((param, name)) =
                key.strip_prefix("optim.state.").and_then(|it| it.rsplit_once('.'))
            else {
                continue;
            };
            let Some(&index) = frozen.get(param) else { continue };
            // A type that planc has no buffers of is no state of an optimizer that it knows.
            let Some(dtype) = stored.dtype.dtype() else { continue };
            let data = &plan.buffers[plan.params[index].buffer];
            let sharding = match stored.shape[..] == data.ty.shape[..] {
                true => data.sharding.clone(),
                false => Sharding::replicated(stored.shape.len()),
            };
            let path = ["optim", "state", param, name].map(str::to_string).to_vec();
            layout.keep(path, TensorType::new(dtype, &stored.shape), sharding);
            self.used.insert(key.to_string());
            res.push(key.to_string());
        }
        res
    }

    /// Numbers that are read elsewhere, and states that the plan has no use for.
    fn numbers(&mut self) {
        let known = |key: &str| {
            ["planc.step", "planc.sample", "planc.seed", "planc.finite"].contains(&key)
                || key.starts_with("planc.schedule.")
        };
        let mut unused = Vec::new();
        for (key, _) in self.checkpoint.tensors() {
            if known(key) {
                self.used.insert(key.to_string());
            } else if key.starts_with("planc.state.") && self.used.insert(key.to_string()) {
                unused.push(key);
            }
        }
        if let Some(first) = unused.first() {
            self.warnings.push(format!(
                "{} of the checkpoint, like `{first}`, have no use in this plan: it has another recipe, or \
                 scales that vary over another mesh",
                numbered(unused.len(), "state")
            ));
        }
    }

    /// Says once of a checkpoint of weights alone what it lacks.
    fn without_optimizer(&mut self) {
        let is_optim = |key: &str| key.starts_with("optim.");
        let tensors = self.checkpoint.tensors().map(|it| it.0);
        if tensors.chain(self.checkpoint.objects()).any(is_optim) {
            return;
        }
        let n = self.problems.len();
        self.problems.retain(|it| !matches!(it, LoadProblem::Missing { key } if is_optim(key)));
        if self.problems.len() < n {
            self.problems.insert(0, LoadProblem::NoOptimizer);
        }
    }

    fn unexpected(&mut self) {
        let known = |key: &str| {
            key.starts_with("optim.param_groups.") || key.starts_with(DIGESTS) || key == DATA
        };
        let objects = self.checkpoint.objects().filter(|it| !known(it));
        let tensors = self.checkpoint.tensors().map(|it| it.0);
        let unused = tensors.filter(|it| !self.used.contains(*it)).chain(objects);
        let allowed = |key: &&str| !allows(&self.options.allow_unexpected, key);
        let unused: Vec<String> = unused.filter(allowed).map(str::to_string).collect();
        self.problems.extend(unused.into_iter().map(|key| LoadProblem::Unexpected { key }));
    }
}

impl Files {
    fn count(&self, key: &str) -> Result<Option<u64>, RunError> {
        let stored = self.checkpoint.tensor(key);
        stored.map(|it| count(&self.checkpoint, key, it)).transpose()
    }

    /// 64 bits of an int64, which may be those of a seed; of other types, a number.
    fn integer(&self, key: &str) -> Result<Option<u64>, RunError> {
        let Some(stored) = self.checkpoint.tensor(key) else { return Ok(None) };
        if stored.dtype != StoredType::I64 || !stored.shape.is_empty() {
            return Ok(Some(number(&self.checkpoint, key, stored)? as u64));
        }
        let mut bytes = [0; 8];
        self.checkpoint.read(key, &Chunk::default(), &mut bytes)?;
        Ok(Some(u64::from_le_bytes(bytes)))
    }

    fn float(&self, key: &str) -> Result<Option<f64>, RunError> {
        let Some(stored) = self.checkpoint.tensor(key) else { return Ok(None) };
        Ok(Some(number(&self.checkpoint, key, stored)?))
    }

    fn object(&self, key: &str) -> Result<Option<Value>, RunError> {
        if !self.checkpoint.objects().any(|it| it == key) {
            return Ok(None);
        }
        Ok(Some(self.checkpoint.object(key)?))
    }

    /// Reads a box of an entry, in the type of the buffer that it is for.
    fn read(
        &self,
        entry: usize,
        chunk: &Chunk,
        (dtype, out): (DType, &mut [u8]),
        raw: &mut Vec<u8>,
    ) -> Result<(), RunError> {
        let (key, others) = self.keys[entry].split_first().expect("it was found there");
        let stored = self.checkpoint.tensor(key).expect("it was found there");
        if stored.dtype == StoredType::from(dtype) {
            self.checkpoint.read(key, chunk, out)?;
        } else {
            raw.resize((volume(chunk) * stored.dtype.bytes()) as usize, 0);
            self.checkpoint.read(key, chunk, raw)?;
            convert(stored.dtype, dtype.into(), raw, out);
        }
        others.iter().try_for_each(|it| same_as(self, it, chunk, key))
    }

    /// Which group of hyper-parameters each parameter is in.
    fn groups(&self) -> Result<BTreeMap<String, u64>, RunError> {
        let mut res = BTreeMap::new();
        for key in self.checkpoint.objects() {
            let group = key.strip_prefix("optim.param_groups.");
            let Some(group) = group.and_then(|it| it.strip_suffix(".params")) else { continue };
            let Ok(group) = group.parse::<u64>() else { continue };
            let names = self.checkpoint.object(key)?;
            let names = names.as_list().unwrap_or_default();
            res.extend(names.iter().filter_map(Value::as_str).map(|it| (it.to_string(), group)));
        }
        Ok(res)
    }
}

impl Rank {
    /// Reads a part of what this rank holds.
    fn load(
        &mut self,
        layout: &CheckpointLayout,
        files: &Files,
        part: Part,
    ) -> Result<Cost, RunError> {
        let wanted = self.wanted(layout, files, part);
        let (mut staging, mut raw) = (Staging::default(), Vec::new());
        let mut cost = Cost::default();
        let mine: Vec<(usize, &LocalBox)> = wanted
            .iter()
            .filter(|it| it.from.as_ref().is_none_or(|it| it.owner == self.bound.coord))
            .flat_map(|it| it.boxes.iter().map(|local| (it.entry, local)))
            .collect();
        let (mut ahead, mut next) = (0, mine.iter());
        let bound = self.bound.clone();
        for (index, local) in &mine {
            let entry = &layout.entries[*index];
            let key = &files.keys[*index][0];
            let stored = files.checkpoint.tensor(key).expect("it was found there");
            let n = volume(&local.chunk) * stored.dtype.bytes();
            while ahead < AHEAD
                && let Some((index, local)) = next.next()
            {
                // What is read in part counts a little, or all of it would be looked at at once.
                let bytes = files.checkpoint.will_need(&files.keys[*index][0], &local.chunk);
                ahead += bytes.max(volume(&local.chunk));
            }
            ahead = ahead.saturating_sub(n);
            files.checkpoint.check_whole_items(key, &local.chunk)?;
            match entry.source {
                Source::Buffer(buffer) => {
                    let mut fetch = |chunk: &Chunk, out: &mut [u8]| {
                        cost.bytes += volume(chunk) * stored.dtype.bytes();
                        files.read(*index, chunk, (entry.ty.dtype, out), &mut raw)
                    };
                    let bound = (buffer, &bound.buffers[buffer]);
                    write_box(&mut *self.backend, bound, local, &mut staging, &mut fetch)?;
                }
                Source::Kept(number) => {
                    let mut bytes = vec![0; n as usize];
                    files.checkpoint.read(key, &local.chunk, &mut bytes)?;
                    cost.bytes += n;
                    self.kept[number].push((local.chunk.clone(), bytes));
                }
            }
        }
        // After all have read, so that nobody waits for what another has not begun.
        for it in &wanted {
            if let (Some(from), Source::Buffer(buffer)) =
                (&it.from, layout.entries[it.entry].source)
            {
                self.receive(buffer, from, &layout.mesh)?;
            }
        }
        cost.extra = staging.bytes() + raw.capacity() as u64;
        Ok(cost)
    }

    /// What this rank holds of a part.
    fn wanted(&mut self, layout: &CheckpointLayout, files: &Files, part: Part) -> Vec<Wanted> {
        let mut res = Vec::new();
        let mut comms = self.plan.meeting_comms();
        comms.sort_by_key(|&it| Reverse(layout.mesh.set_size(self.plan.comms[it])));
        for (index, entry) in layout.entries.iter().enumerate() {
            if files.keys[index].is_empty() || Part::of(entry) != part {
                continue;
            }
            let mut from = None;
            match entry.source {
                Source::Kept(number) => {
                    self.kept.resize_with(self.kept.len().max(number + 1), Vec::new);
                    if !entry.sharding.owns(&self.bound.coord, &layout.mesh, entry.salt) {
                        continue;
                    }
                }
                Source::Buffer(_) => from = self.share(layout, entry, &comms),
            }
            let (shape, mesh) = (&entry.ty.shape, &layout.mesh);
            let boxes = entry.sharding.local_boxes(shape, mesh, &self.bound.coord);
            res.push(Wanted { entry: index, boxes, from });
        }
        res
    }

    /// Who reads an entry for this rank and others that hold the same of it; `None` if each reads it.
    fn share(&self, layout: &CheckpointLayout, entry: &Entry, comms: &[Comm]) -> Option<Shared> {
        let (mesh, axes) = (&layout.mesh, &self.plan.comms);
        let copies = mesh.all().minus(entry.sharding.sharded_axes());
        let (mut over, mut among) = (Vec::new(), AxisSet::EMPTY);
        for &comm in comms {
            if axes[comm].is_subset(copies.minus(among)) {
                over.push(comm);
                among = among.union(axes[comm]);
            }
        }
        let owner = entry.sharding.owner(&self.bound.coord, mesh, entry.salt, among);
        (!over.is_empty()).then_some(Shared { owner, over })
    }

    /// Gets, and gives on, what another rank has read. Each communicator multiplies those that have it, so
    /// only ranks take part that are where the owner is on the axes of later ones.
    fn receive(&mut self, buffer: Buffer, from: &Shared, mesh: &Mesh) -> Result<(), RunError> {
        let coord = self.bound.coord.clone();
        for (i, &comm) in from.over.iter().enumerate() {
            let axes = |it: Comm| self.plan.comms[it];
            let same = |it: &Comm| {
                mesh.index_in(axes(*it), &coord) == mesh.index_in(axes(*it), &from.owner)
            };
            if from.over[i + 1..].iter().all(same) {
                let root = mesh.index_in(axes(comm), &from.owner);
                self.backend.broadcast(buffer, comm, root as usize)?;
            }
        }
        Ok(())
    }
}

/// What a rank holds of an entry.
struct Wanted {
    entry: usize,
    boxes: Vec<LocalBox>,
    /// From whom it gets them; `None` if it reads them itself.
    from: Option<Shared>,
}

/// What one rank reads for others.
struct Shared {
    /// The coordinate of the one that reads.
    owner: Coord,
    /// Over what the others get it, one after the other. No two have an axis in common, and none has one
    /// that shards.
    over: Vec<Comm>,
}

/// Whether another name of a tied tensor has the same bytes.
fn same_as(files: &Files, key: &str, chunk: &Chunk, first: &str) -> Result<(), RunError> {
    let tensor = |it: &str| files.checkpoint.tensor(it).expect("it was found there");
    let (a, b) = (tensor(first), tensor(key));
    if a.chunks == b.chunks {
        return Ok(());
    }
    let read = |key: &str, stored: &StoredTensor| -> Result<Vec<u8>, RunError> {
        let mut res = vec![0; (volume(chunk) * stored.dtype.bytes()) as usize];
        files.checkpoint.read(key, chunk, &mut res)?;
        Ok(res)
    };
    if a.dtype != b.dtype || read(first, a)? != read(key, b)? {
        let (first, second) = (first.to_string(), key.to_string());
        return Err(RunError::WeightsDiffer { first, second });
    }
    Ok(())
}

pub(super) fn volume(chunk: &Chunk) -> u64 {
    chunk.sizes.iter().product()
}

/// A tensor of one number, which counts steps or samples.
fn count(checkpoint: &Checkpoint, key: &str, stored: &StoredTensor) -> Result<u64, RunError> {
    let found = number(checkpoint, key, stored)?;
    if is_count(found) {
        return Ok(found as u64);
    }
    let problems = vec![LoadProblem::Count { key: key.to_string(), found: found.to_string() }];
    Err(RunError::LoadMismatch { path: checkpoint.path().to_path_buf(), problems })
}

/// A tensor of one number.
fn number(checkpoint: &Checkpoint, key: &str, stored: &StoredTensor) -> Result<f64, RunError> {
    let wrong = |found| RunError::LoadMismatch {
        path: checkpoint.path().to_path_buf(),
        problems: vec![LoadProblem::Number { key: key.to_string(), found }],
    };
    match checkpoint.number(key)? {
        Some(found) => Ok(found),
        None if stored.n_elements() != 1 => Err(wrong(format!("{:?}", stored.shape))),
        None => Err(wrong(stored.dtype.to_string())),
    }
}

fn allows(patterns: &[NamePattern], key: &str) -> bool {
    patterns.iter().any(|it| it.matches(key))
}

/// `1 state`, `3 states`.
fn numbered(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Whether two hyper-parameters are the same numbers.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_list(), b.as_list()) {
        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (None, None) => a.as_float() == b.as_float(),
        _ => false,
    }
}

fn text(value: &Value) -> String {
    match (value.as_list(), value.as_float()) {
        (Some(list), _) => {
            format!("({})", list.iter().map(text).collect::<Vec<String>>().join(", "))
        }
        (None, Some(it)) => format!("{it:?}"),
        (None, None) => format!("{value:?}"),
    }
}
