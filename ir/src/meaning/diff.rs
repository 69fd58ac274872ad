//! [`diff`]: what two plans do differently.
//!
//! Values of the two are first told to be the same: those that are computed alike, whatever they are called;
//! of the rest, those with one name; then those that are computed alike from such. What is reported is where
//! a difference arises and not what follows from it: a tensor whose op and operands are the same is not
//! named for the sake of an operand of an operand. Movements between ranks are looked through when numbers
//! are compared, and are compared by themselves.

mod collectives;
mod numerics;
mod side;
mod text;

use rustc_hash::FxHashMap;
use serde::Serialize;

use super::{Meaning, Tensor};
use crate::graph::Name;
use crate::model::axes_text;

use side::Side;
use text::{Raw, Text};

/// What two plans do differently.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Diff {
    /// Collectives by axes and kind, all of them, if the number or bytes of some differ.
    pub totals: Vec<TotalChange>,
    /// All else, by area.
    pub changes: Vec<Change>,
}

impl Diff {
    /// Whether the plans mean the same.
    pub fn is_empty(&self) -> bool {
        self.totals.is_empty() && self.changes.is_empty()
    }
}

/// What a change is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Area {
    /// Mesh, data, sizes, the learning rate.
    Model,
    /// Where tensors live, and which there are.
    Placement,
    /// What is computed: ops, types, constants, reductions.
    Numerics,
    /// What moves between ranks.
    Collectives,
    /// Bytes, and what is there at the peak.
    Memory,
    /// When collectives start and who waits for them.
    Schedule,
}

/// One change, with all that it holds for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// What it is about.
    pub area: Area,
    /// Which property changes: `sharding`, `dtype`, `starts after`, ...
    pub what: &'static str,
    /// Of what; empty for the plan as a whole.
    pub of: Vec<Subject>,
    /// In the first plan; absent if the first has no such thing.
    pub from: Option<String>,
    /// In the second plan.
    pub to: Option<String>,
}

/// Tensors of the same name in some layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Subject {
    /// `model.layers.{0..31}.mlp.act`.
    pub name: String,
    /// How many they are.
    pub count: usize,
}

/// Calls of one kind over one set of axes, in both plans.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TotalChange {
    /// The user's axes.
    pub over: String,
    /// `all_gather`, ...
    pub kind: String,
    /// In the first plan.
    pub from: Total,
    /// In the second plan.
    pub to: Total,
}

/// Calls, bytes and bytes sent of one rank and one step; see [`CollectiveTotal`](crate::summary::CollectiveTotal).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Total {
    /// Calls.
    pub count: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bytes that a rank sends in a ring.
    pub wire_bytes: u64,
}

/// What two plans do differently.
pub fn diff(a: &Meaning, b: &Meaning) -> Diff {
    let old = Side::of(a);
    let renamed = old.renames(&Side::of(b));
    let b = &b.renamed(&renamed);
    let new = Side::of(b);
    let mut cx = Cx { old: &old, new: &new, raw: Vec::new() };
    cx.model(a, b);
    cx.tensors();
    cx.numerics();
    cx.moves();
    let totals = collectives::totals(a, b);
    cx.memory(a, b);
    cx.schedule();
    Diff { totals, changes: text::grouped(cx.raw) }
}

struct Cx<'a> {
    old: &'a Side<'a>,
    new: &'a Side<'a>,
    raw: Vec<Raw>,
}

impl<'a> Cx<'a> {
    /// Notes a change, if there is one.
    fn note(
        &mut self,
        area: Area,
        what: &'static str,
        name: &str,
        from: Option<Text>,
        to: Option<Text>,
    ) {
        if from != to {
            self.raw.push(Raw { area, what, name: name.to_string(), from, to });
        }
    }

    fn words(
        &mut self,
        area: Area,
        what: &'static str,
        name: &str,
        from: impl ToString,
        to: impl ToString,
    ) {
        self.note(area, what, name, Some(Text::words(from)), Some(Text::words(to)));
    }

    /// Names that both have, and those that one has, in the order of the first and then of the second.
    fn names(&self) -> Vec<&'a str> {
        let (old, new) = (self.old, self.new);
        let first = old.meaning.tensors.iter().map(|it| it.name.as_str());
        let second = new.meaning.tensors.iter().map(|it| it.name.as_str());
        first.chain(second.filter(|it| !old.tensors.contains_key(it))).collect()
    }

    fn model(&mut self, a: &Meaning, b: &Meaning) {
        let (a, b) = (&a.program, &b.program);
        let mesh = |it: &[(Name, u32)]| axes_text(it.iter().map(|it| (&it.0, it.1)), " x ");
        self.words(Area::Model, "model", "", &a.name, &b.name);
        self.words(Area::Model, "mesh", "", mesh(&a.mesh), mesh(&b.mesh));
        self.words(Area::Model, "micro_batches", "", a.micro_batches, b.micro_batches);
        let (old, new) = (&a.run, &b.run);
        self.words(Area::Model, "steps", "", old.steps, new.steps);
        self.words(Area::Model, "seed", "", old.seed, new.seed);
        self.words(Area::Model, "global batch", "", old.global_batch, new.global_batch);
        self.words(Area::Model, "sequence", "", old.sequence, new.sequence);
        self.words(Area::Model, "vocabulary", "", old.vocab, new.vocab);
        self.words(Area::Numerics, "ignored label", "", old.ignore_index, new.ignore_index);
        let ron = |it: &crate::run::Schedule| ron::to_string(it).expect("numbers have a text");
        self.words(Area::Numerics, "learning rate", "", ron(&old.schedule), ron(&new.schedule));
        let results = |it: &[(Name, Name)]| {
            let names: Vec<&str> = it.iter().map(|it| it.0.as_str()).collect();
            let tensors = it.iter().map(|it| it.1.as_str());
            Text::words(names.join(", ")).then(" = ").names(tensors, "nothing")
        };
        self.note(Area::Model, "results", "", Some(results(&a.results)), Some(results(&b.results)));
    }

    fn tensors(&mut self) {
        for name in self.names() {
            let pair = (self.old.tensors.get(name).copied(), self.new.tensors.get(name).copied());
            let text = |it: &Tensor| {
                let role = it.role.name();
                Text::words(format!("{role} {}{:?} @ {}", it.dtype, it.shape, it.sharding))
            };
            let (Some(a), Some(b)) = pair else {
                self.note(Area::Placement, "tensor", name, pair.0.map(text), pair.1.map(text));
                continue;
            };
            let shape = |it: &Tensor| format!("{:?}", it.shape);
            let aliases = |it: &Tensor| it.aliases.join(", ");
            self.words(Area::Model, "shape", name, shape(a), shape(b));
            self.words(Area::Model, "init", name, &a.init, &b.init);
            self.words(Area::Model, "aliases", name, aliases(a), aliases(b));
            self.words(Area::Placement, "sharding", name, &a.sharding, &b.sharding);
            self.words(Area::Placement, "role", name, a.role.name(), b.role.name());
            self.words(Area::Numerics, "dtype", name, a.dtype, b.dtype);
        }
    }

    fn memory(&mut self, a: &Meaning, b: &Meaning) {
        let total = |it: &Meaning| {
            it.program.persistent_bytes + it.program.step_bytes + it.program.workspace_bytes
        };
        let (old, new) = (&a.program, &b.program);
        self.words(Area::Memory, "total bytes", "", total(a), total(b));
        self.words(Area::Memory, "kept bytes", "", old.persistent_bytes, new.persistent_bytes);
        self.words(Area::Memory, "temporary bytes", "", old.step_bytes, new.step_bytes);
        self.words(Area::Memory, "scratch bytes", "", old.workspace_bytes, new.workspace_bytes);
        let peak = |it: &Meaning| {
            let (section, what, name) = it.program.peak.as_ref()?;
            let words = Text::words(format!("{}: {what}", section.name()));
            Some(words.then(" making ").names([name.as_str()], ""))
        };
        self.note(Area::Memory, "peak at", "", peak(a), peak(b));
        let held = |it: &Meaning| -> FxHashMap<Name, u64> {
            it.held.iter().map(|it| (it.name.clone(), it.bytes)).collect()
        };
        let (first, second) = (held(a), held(b));
        for name in self.names() {
            let text = |it: &FxHashMap<Name, u64>| it.get(name).map(Text::words);
            self.note(Area::Memory, "bytes at the peak", name, text(&first), text(&second));
        }
    }
}
