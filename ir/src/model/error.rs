//! `ModelError`: what is wrong with a `model.ron`, and where.
//!
//! Syntax and schema errors know their bytes in the source. The meaning is checked on the parsed
//! model, where serde keeps no spans, so those errors carry a path (`layers[1].body[0].attention`)
//! and [`ModelError::span`] finds it in the source.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use ron::error::{Position, Span, SpannedError};

use super::jobs;
use super::locate::locate;
use super::pattern::PatternError;
use crate::build::BuildError;
use crate::ops::TypeError;
use crate::placement::PlacementError;

/// An error of the user's model, mesh or overrides.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{problem}")]
pub struct ModelError {
    /// What is wrong.
    pub problem: Box<Problem>,
    /// Where.
    pub at: At,
}

/// Where an error is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum At {
    /// These bytes of the source.
    Source {
        /// Byte range; may be empty.
        bytes: Range<usize>,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
    },
    /// This field: `layers[1].body[0].attention.kv_heads`.
    Path(String),
    /// The text of the mesh, as in `--mesh 2x4`.
    Mesh,
    /// An override, as in `--set precision.compute=bf16`; its path.
    Override(String),
}

/// What is wrong, with the values that a message or a program needs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Problem {
    /// Not RON, or a value of the wrong type.
    #[error("{what}")]
    Syntax {
        /// The message, lower case.
        what: String,
    },
    /// A value of another type than the field has.
    #[error("expected {expected}, found {found}")]
    WrongType {
        /// The type of the field.
        expected: String,
        /// What is written.
        found: String,
    },
    /// A field that the module does not have.
    #[error("{} has no field `{field}`", subject(.owner, "this"))]
    UnknownField {
        /// The struct, where it has a name.
        owner: Option<String>,
        /// The field.
        field: String,
        /// What it has.
        known: Vec<String>,
    },
    /// A field that must be given.
    #[error("{} needs the field `{field}`", subject(.owner, "this"))]
    MissingField {
        /// The struct, where it has a name.
        owner: Option<String>,
        /// The field.
        field: String,
    },
    /// A field that is given twice.
    #[error("the field `{field}` is given twice")]
    DuplicateField {
        /// The field.
        field: String,
    },
    /// A key that a map gives twice.
    #[error("the key `{key}` is given twice in one map, first at {line}:{column}")]
    DuplicateKey {
        /// The key, as written.
        key: String,
        /// Line of the first, from 1.
        line: usize,
        /// Column of the first in characters, from 1.
        column: usize,
    },
    /// A word that is none of a closed list: a module, an activation, a dtype.
    #[error("unknown {} `{found}`", .owner.as_deref().unwrap_or("variant"))]
    UnknownVariant {
        /// What the list is of.
        owner: Option<String>,
        /// The word.
        found: String,
        /// The list.
        known: Vec<String>,
    },
    /// An override that cannot be applied.
    #[error("`{path}={value}` cannot be set: {why}")]
    Override {
        /// The path.
        path: String,
        /// The value.
        value: String,
        /// Why not.
        why: String,
        /// The overrides that were probably meant.
        help: Option<String>,
    },
    /// The text of a mesh that is not one.
    #[error("`{text}` is no mesh: {why}")]
    BadMesh {
        /// The text.
        text: String,
        /// Why not.
        why: String,
    },
    /// A mesh axis without coordinates.
    #[error("the mesh has an axis of size 0{}; an axis needs at least one rank", which(.axis))]
    EmptyAxis {
        /// The axis, or its position; `None` if it is the only one.
        axis: Option<String>,
    },
    /// A mesh with a number of axes for which the model has no names.
    #[error("the mesh has {found} axes, and the model names the axes of {}", meshes_text(.known))]
    AxisCount {
        /// Axes of the mesh.
        found: usize,
        /// Names of the axes of each mesh, by how many there are.
        known: BTreeMap<usize, Vec<String>>,
    },
    /// A name that is no axis of any mesh of the model.
    #[error("no mesh of this model has an axis `{name}`")]
    UnknownAxis {
        /// The name.
        name: String,
        /// The axes that there are.
        known: Vec<String>,
    },
    /// One axis does two jobs.
    #[error("axis `{axis}` is both {first} and {second}; one axis can do one of them")]
    AxisTwice {
        /// The axis.
        axis: String,
        /// One job.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// An axis that cuts nothing.
    #[error(
        "axis `{axis}` of size {size} cuts no data, weight or activation: its ranks would all do the \
         same work"
    )]
    IdleAxis {
        /// The axis.
        axis: String,
        /// The number of coordinates.
        size: u32,
    },
    /// A placement that is none of this tensor.
    #[error("`{tensor}`: {source}")]
    Placement {
        /// The tensor.
        tensor: String,
        /// Why.
        source: PlacementError,
    },
    /// A parameter that would be stored as a sum over ranks.
    #[error(
        "`{tensor}`: a parameter cannot be `Partial` over `{axis}`: each rank holds its values, not a part of a sum"
    )]
    PartialParam {
        /// The parameter.
        tensor: String,
        /// The axis.
        axis: String,
    },
    /// A size that an axis must divide.
    #[error("`{tensor}`: {what} is {size}, which `{axis}` of size {axis_size} does not divide")]
    Indivisible {
        /// The tensor or module.
        tensor: String,
        /// The dimension, as `dim 0 (ffn)`.
        what: String,
        /// Its size.
        size: u64,
        /// The axis, or axes.
        axis: String,
        /// The number of coordinates.
        axis_size: u64,
        /// What would fix it.
        fix: String,
    },
    /// KV heads that can be neither shared out nor replicated evenly.
    #[error(
        "`{module}`: kv_heads is {kv_heads}, which neither divides nor is divided by `{axis}` of \
         size {axis_size}"
    )]
    KvHeads {
        /// The module.
        module: String,
        /// Its KV heads.
        kv_heads: u64,
        /// The tensor-parallel axis.
        axis: String,
        /// Its size.
        axis_size: u64,
    },
    /// A batch that cannot be shared out evenly.
    #[error(
        "a batch of {batch} sequences is not divisible by {micro_batches} micro-batches times \
         {data_parallel} data-parallel coordinates ({axes})"
    )]
    Batch {
        /// Sequences of a step.
        batch: u64,
        /// Micro-batches of a step.
        micro_batches: u64,
        /// Coordinates over the data-parallel axes.
        data_parallel: u64,
        /// The data-parallel axes with sizes.
        axes: String,
    },
    /// A number out of its range.
    #[error("{field} is {found}, and must be {expected}")]
    Range {
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// What it must be.
        expected: String,
    },
    /// Operands that do not fit an op.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A module got another number of tensors than it takes.
    #[error("`{module}` takes {expected}, and the module before it gives {found}")]
    Inputs {
        /// The module.
        module: String,
        /// What it takes.
        expected: String,
        /// What it gets.
        found: usize,
    },
    /// A tensor with another size than the module says.
    #[error("`{module}`: {what} is {expected}, but its input has {found}")]
    Size {
        /// The module.
        module: String,
        /// Which size.
        what: String,
        /// What the module says.
        expected: u64,
        /// What it gets.
        found: u64,
    },
    /// A pattern that fits no parameter.
    #[error("`{pattern}` in {field} matches no parameter of the model")]
    NoMatch {
        /// The field.
        field: String,
        /// The pattern.
        pattern: String,
        /// The parameter whose name is nearest.
        nearest: Option<String>,
    },
    /// A pattern that cannot be read.
    #[error(transparent)]
    Pattern(#[from] PatternError),
    /// A tie that leads to no parameter, or to several.
    #[error("`{alias}` in tied {why}")]
    Tie {
        /// The name that is tied.
        alias: String,
        /// What is wrong with that.
        why: String,
    },
    /// An option of a name that is tied to another.
    #[error("`{pattern}` in {field} is tied to `{name}`, which has the options of both")]
    TiedOption {
        /// The field.
        field: String,
        /// The pattern that matches the alias.
        pattern: String,
        /// The parameter.
        name: String,
    },
    /// Two parameters of one name.
    #[error(
        "two parameters are called `{name}`; give one of their modules another name, or tie them"
    )]
    DuplicateParam {
        /// The name.
        name: String,
    },
    /// An op that activation checkpointing lists, and that the layers do not have.
    #[error("no op of these layers is `{op}`")]
    NoSuchOp {
        /// The op.
        op: String,
        /// The ops that there are.
        known: Vec<String>,
    },
    /// Another path for a part that a module does not have.
    #[error("`{module}` has no part `{name}`")]
    UnknownPart {
        /// The module.
        module: String,
        /// The key of the part.
        name: String,
        /// The keys of the parts that it has.
        known: Vec<String>,
    },
    /// A field that is read nowhere.
    #[error("`{field}` has no effect here: {why}")]
    NoEffect {
        /// The field.
        field: String,
        /// The reason, and what to write instead.
        why: String,
    },
    /// Two `Repeat`s whose iterations have the same name.
    #[error(
        "`{prefix}.{}` is an iteration of this `Repeat`, which counts {}, and of {other_at}, which counts {}",
        first_shared(.range, .other), numbers(.range), numbers(.other)
    )]
    Numbers {
        /// Dotted path in front of the number.
        prefix: String,
        /// Numbers of its iterations.
        range: Range<u64>,
        /// Numbers of the other's iterations.
        other: Range<u64>,
        /// The place of the other in the source.
        other_at: String,
    },
    /// Tied parameters of different shapes.
    #[error("`{alias}` of shape {alias_shape:?} is tied to `{name}` of shape {shape:?}")]
    Tied {
        /// The second use.
        alias: String,
        /// The shape it needs.
        alias_shape: Vec<u64>,
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A name in a block that nothing defines.
    #[error("`{block}`: no value is called `{name}` here")]
    UnknownValue {
        /// The block.
        block: String,
        /// The name.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// An op in a block that does not exist.
    #[error("`{block}`: unknown op `{found}`")]
    UnknownOp {
        /// The block.
        block: String,
        /// The word.
        found: String,
        /// The ops there are.
        known: Vec<String>,
    },
    /// An op in a block that cannot be read.
    #[error("`{block}`: {why}")]
    Op {
        /// The block.
        block: String,
        /// Why.
        why: String,
    },
    /// All parameters are frozen.
    #[error("all parameters are frozen: a step would train nothing")]
    NothingTrained,
    /// The model computes no loss.
    #[error("the model has no loss; its last layer must be `CrossEntropy`")]
    NoLoss,
}

/// Whether an `add` was meant to be a `bias_add`.
fn adds_different_ndim(error: &BuildError) -> bool {
    error.op == "add" && matches!(error.source, TypeError::Sizes { what: "numbers of dims", .. })
}

/// The first number that two ranges share.
fn first_shared(a: &Range<u64>, b: &Range<u64>) -> u64 {
    a.start.max(b.start)
}

/// `0 to 3`, of iterations.
fn numbers(range: &Range<u64>) -> String {
    format!("{} to {}", range.start, range.end.saturating_sub(1))
}

/// `meshes of 1 (dp), 2 (dp, tp)`.
fn meshes_text(meshes: &BTreeMap<usize, Vec<String>>) -> String {
    if meshes.is_empty() {
        return "no mesh".to_string();
    }
    let text = meshes.iter().map(|(n, axes)| format!("{n} ({})", axes.join(", ")));
    format!("meshes of {}", text.collect::<Vec<_>>().join(", "))
}

/// Advice for a mesh of so many axes, with the mesh of the model that is nearest.
fn axis_count_help(found: usize, known: &BTreeMap<usize, Vec<String>>) -> String {
    let name = format!("name the {} in `meshes`", if found == 1 { "axis" } else { "axes" });
    match known.iter().min_by_key(|it| it.0.abs_diff(found)) {
        Some((_, axes)) => {
            let axes: Vec<String> = axes.iter().map(|it| format!("{it}=2")).collect();
            format!("{name}, or give a mesh that the model has: `--mesh {}`", axes.join(","))
        }
        None => name,
    }
}

fn which(axis: &Option<String>) -> String {
    axis.as_ref().map_or(String::new(), |it| format!(", {it}"))
}

fn subject(owner: &Option<String>, otherwise: &str) -> String {
    owner.as_ref().map_or(otherwise.to_string(), |it| format!("`{it}`"))
}

impl ModelError {
    /// Stable code: `PL01xx` is how the file is written, `PL02xx` what it means.
    pub fn code(&self) -> &'static str {
        match *self.problem {
            Problem::Syntax { .. } => "PL0101",
            Problem::UnknownField { .. } => "PL0102",
            Problem::WrongType { .. } => "PL0103",
            Problem::MissingField { .. } => "PL0104",
            Problem::UnknownVariant { .. } => "PL0105",
            Problem::DuplicateField { .. } | Problem::DuplicateKey { .. } => "PL0106",
            Problem::Override { .. } => "PL0107",
            Problem::UnknownAxis { .. } => "PL0201",
            Problem::Placement { .. } | Problem::PartialParam { .. } => "PL0202",
            Problem::Indivisible { .. } => "PL0203",
            Problem::KvHeads { .. } => "PL0204",
            Problem::AxisCount { .. } => "PL0205",
            Problem::BadMesh { .. } | Problem::EmptyAxis { .. } => "PL0206",
            Problem::Batch { .. } => "PL0207",
            Problem::Build(_) | Problem::Size { .. } => "PL0208",
            Problem::NoMatch { .. }
            | Problem::Pattern(_)
            | Problem::Tie { .. }
            | Problem::TiedOption { .. }
            | Problem::UnknownPart { .. }
            | Problem::NoSuchOp { .. } => "PL0209",
            Problem::Tied { .. } => "PL0210",
            Problem::DuplicateParam { .. } | Problem::Numbers { .. } => "PL0211",
            Problem::Inputs { .. } | Problem::NoLoss => "PL0212",
            Problem::Op { .. } | Problem::UnknownOp { .. } => "PL0213",
            Problem::UnknownValue { .. } => "PL0214",
            Problem::AxisTwice { .. } => "PL0215",
            Problem::Range { .. } => "PL0216",
            Problem::NoEffect { .. } => "PL0217",
            Problem::IdleAxis { .. } => "PL0218",
            Problem::NothingTrained => "PL0219",
        }
    }

    /// What would fix it, where the message does not say so.
    pub fn help(&self) -> Option<String> {
        match &*self.problem {
            Problem::Numbers { other, .. } => {
                Some(format!("`first: {}` counts on where the other ends", other.end))
            }
            Problem::UnknownField { field, known, .. }
            | Problem::UnknownVariant { found: field, known, .. }
            | Problem::UnknownOp { found: field, known, .. }
            | Problem::UnknownPart { name: field, known, .. }
            | Problem::NoSuchOp { op: field, known }
            | Problem::UnknownValue { name: field, known, .. } => Some(suggest(field, known)),
            Problem::UnknownAxis { name, known } => Some(match jobs::hint_unknown(name, known) {
                Some(hint) => format!("{hint}; this model has the axes {}", known.join(", ")),
                None => suggest(name, known),
            }),
            Problem::IdleAxis { axis, .. } => Some(jobs::hint(axis).unwrap_or_else(|| {
                format!(
                    "give it a job in `data_parallel`, `fsdp.axes`, `tp_mesh` or `placements`, leave it \
                     out of the mesh, or write `replicas: [\"{axis}\"]`"
                )
            })),
            Problem::Indivisible { fix, .. } => Some(fix.clone()),
            Problem::KvHeads { kv_heads, axis, .. } => Some(format!(
                "use a `{axis}` that divides {kv_heads} (each rank gets some of the KV heads) or a \
                 multiple of it (each KV head is replicated)"
            )),
            Problem::Batch { micro_batches, data_parallel, .. } => Some(format!(
                "use a batch that is a multiple of {}, or fewer micro-batches",
                micro_batches * data_parallel
            )),
            Problem::AxisCount { found, known } => Some(axis_count_help(*found, known)),
            Problem::BadMesh { .. } | Problem::EmptyAxis { .. } => {
                Some("write `8`, `2x4` or `dp=2,tp=4`".to_string())
            }
            Problem::NoMatch { nearest, .. } => {
                nearest.as_ref().map(|it| format!("the nearest parameter is `{it}`"))
            }
            Problem::TiedOption { name, .. } => Some(format!("give the option to `{name}`")),
            Problem::Build(it) if adds_different_ndim(it) => {
                Some("`bias_add` adds a vector to every row".to_string())
            }
            Problem::PartialParam { axis, .. } => {
                Some(format!("write `\"{axis}\": Replicate` or `\"{axis}\": Shard(dim)`"))
            }
            Problem::Tied { .. } => Some("tied parameters have one shape".to_string()),
            Problem::NothingTrained => Some(
                "leave at least one parameter out of `frozen`, or write `trainable: true` for it in \
                 `parameters`"
                    .to_string(),
            ),
            Problem::Override { help, .. } => help.clone(),
            Problem::MissingField { .. }
            | Problem::Syntax { .. }
            | Problem::WrongType { .. }
            | Problem::DuplicateField { .. }
            | Problem::DuplicateKey { .. }
            | Problem::Placement { .. }
            | Problem::AxisTwice { .. }
            | Problem::Range { .. }
            | Problem::Build(_)
            | Problem::Pattern(_)
            | Problem::Tie { .. }
            | Problem::NoEffect { .. }
            | Problem::Inputs { .. }
            | Problem::Size { .. }
            | Problem::DuplicateParam { .. }
            | Problem::Op { .. }
            | Problem::NoLoss => None,
        }
    }

    /// The same error of a text that starts `by` bytes further on.
    pub(super) fn shifted(mut self, by: usize) -> ModelError {
        if let At::Source { bytes, .. } = &mut self.at {
            *bytes = bytes.start + by..bytes.end + by;
        }
        self
    }

    /// The bytes of the source to point at; `None` if the error is not in the file.
    pub fn span(&self, source: &str) -> Option<Range<usize>> {
        match &self.at {
            At::Source { bytes, .. } => Some(bytes.clone()),
            At::Path(path) => locate(source, path),
            At::Mesh | At::Override(_) => None,
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Source { line, column, .. } => write!(f, "{line}:{column}"),
            At::Path(path) => f.write_str(path),
            At::Mesh => f.write_str("--mesh"),
            At::Override(path) => write!(f, "--set {path}"),
        }
    }
}

impl Problem {
    pub(super) fn at(self, at: At) -> ModelError {
        ModelError { problem: Box::new(self), at }
    }
}

/// An error of the RON parser, in our words where we know what was meant.
pub(super) fn from_ron(source: &str, error: SpannedError) -> ModelError {
    use ron::Error as E;
    let place = bytes_of(source, error.span);
    let (start, end) = (place.start, place.end);
    let known = |it: &[&str]| it.iter().map(|it| it.to_string()).collect();
    // The parser stands behind a name that it dislikes.
    let behind = |word: &str| match source[..end].rfind(word) {
        Some(at) => at..at + word.len(),
        None => place.clone(),
    };
    let mistyped = |expected: &str| {
        let bytes = word_at(source, start);
        let found = match &source[bytes.clone()] {
            "" => "the end".to_string(),
            it => format!("`{it}`"),
        };
        (Problem::WrongType { expected: expected.to_string(), found }, bytes)
    };
    if let Some((problem, bytes)) = wrong_number(source, end, &error.code) {
        let (line, column) = position(source, bytes.start);
        return problem.at(At::Source { bytes, line, column });
    }
    let (problem, bytes) = match error.code {
        E::ExceededRecursionLimit => {
            let what =
                "brackets are nested deeper than any model needs: modules may be nested 19 deep";
            (Problem::Syntax { what: what.to_string() }, place.clone())
        }
        E::NoSuchStructField { expected, found, outer } => {
            let bytes = behind(&found);
            (Problem::UnknownField { owner: outer, field: found, known: known(expected) }, bytes)
        }
        E::NoSuchEnumVariant { expected, found, outer } => {
            let (bytes, owner) = (behind(&found), outer.map(|it| noun(&it)));
            (Problem::UnknownVariant { owner, found, known: known(expected) }, bytes)
        }
        E::DuplicateStructField { field, .. } => {
            (Problem::DuplicateField { field: field.to_string() }, behind(field))
        }
        E::MissingStructField { field, outer } => {
            let problem = Problem::MissingField { owner: outer, field: field.to_string() };
            (problem, place.clone())
        }
        E::InvalidValueForType { expected, found } => {
            (Problem::WrongType { expected, found }, place.clone())
        }
        E::ExpectedInteger | E::InvalidIntegerDigit { .. } => mistyped("a whole number"),
        E::ExpectedFloat => mistyped("a number"),
        E::ExpectedBoolean => mistyped("true or false"),
        E::ExpectedString => mistyped("a string in quotes"),
        E::ExpectedArray => mistyped("a list `[...]`"),
        E::ExpectedMap => mistyped("a map `{...}`"),
        E::ExpectedStructLike | E::ExpectedNamedStructLike(_) => match word_before(source, start) {
            Some(word) => {
                let name = &source[word.clone()];
                let expected = format!("`{name}(...)`, whose brackets hold its fields or nothing");
                (Problem::WrongType { expected, found: "the name alone".to_string() }, word)
            }
            None => mistyped("fields in `(...)`"),
        },
        E::ExpectedDifferentStructName { found, .. } => {
            let expected = "fields in `(...)`".to_string();
            let bytes = behind(&found);
            (Problem::WrongType { expected, found: format!("`{found}`") }, bytes)
        }
        E::ExpectedIdentifier => mistyped("a name"),
        E::InvalidIdentifier(found) | E::SuggestRawIdentifier(found) => {
            let bytes = behind(&found);
            (
                Problem::WrongType { expected: "a name".to_string(), found: format!("`{found}`") },
                bytes,
            )
        }
        other => (Problem::Syntax { what: lower(&other.to_string()) }, place.clone()),
    };
    let (line, column) = position(source, bytes.start);
    problem.at(At::Source { bytes, line, column })
}

/// The error of a number around `at` that its field does not take: a fraction, or one that is out of range.
fn wrong_number(source: &str, at: usize, code: &ron::Error) -> Option<(Problem, Range<usize>)> {
    use ron::Error as E;
    let is_part = |it: char| it.is_ascii_alphanumeric() || "_.+-".contains(it);
    let start = source[..at].trim_end_matches(is_part).len();
    let len = source[start..].find(|it| !is_part(it)).unwrap_or(source.len() - start);
    let number = &source[start..start + len];
    let field = source[..start].trim_end().strip_suffix(':')?;
    let field = &field[word_before(field, field.len())?];
    let value: f64 = number.replace('_', "").parse().ok().filter(|it: &f64| it.is_finite())?;
    let is_fraction = number.contains(['.', 'e', 'E']);
    let expected = match code {
        E::ExpectedComma
        | E::ExpectedStructLikeEnd
        | E::ExpectedInteger
        | E::InvalidIntegerDigit { .. }
            if is_fraction =>
        {
            "a whole number"
        }
        // serde names the type of the field.
        E::InvalidValueForType { expected, .. } if !expected.contains("integer") => return None,
        E::InvalidValueForType { .. } | E::IntegerOutOfBounds if value < 0.0 => {
            "a whole number of at least 0"
        }
        E::InvalidValueForType { .. } | E::IntegerOutOfBounds => "a smaller whole number",
        _ => return None,
    };
    let (expected, found) = (format!("{expected} for `{field}`"), format!("`{number}`"));
    Some((Problem::WrongType { expected, found }, start..start + len))
}

/// The bytes of a span of the RON parser. A span that ends before it starts, as the parser gives them for some
/// errors, is empty.
pub(crate) fn bytes_of(source: &str, span: Span) -> Range<usize> {
    let (start, end) = (offset(source, span.start), offset(source, span.end));
    start..end.max(start)
}

/// The error of a key that a map gives twice, at these two places.
pub(super) fn repeated_key(source: &str, [first, second]: [Range<usize>; 2]) -> ModelError {
    let key = source[first.clone()].to_string();
    let (line, column) = position(source, first.start);
    let problem = Problem::DuplicateKey { key, line, column };
    let (line, column) = position(source, second.start);
    problem.at(At::Source { bytes: second, line, column })
}

/// The line and the column of a byte, both from 1.
fn position(source: &str, byte: usize) -> (usize, usize) {
    let line = 1 + source[..byte].matches('\n').count();
    let line_start = source[..byte].rfind('\n').map_or(0, |it| it + 1);
    (line, 1 + source[line_start..byte].chars().count())
}

/// The byte of a line and column.
fn offset(source: &str, position: Position) -> usize {
    let lines = source.split_inclusive('\n').take(position.line.saturating_sub(1));
    let start: usize = lines.map(str::len).sum();
    let rest = &source[start..];
    let column = rest.char_indices().nth(position.col.saturating_sub(1));
    start + column.map_or(rest.len(), |it| it.0)
}

/// The word or bracket that starts at `at`, after white space.
fn word_at(source: &str, at: usize) -> Range<usize> {
    let rest = &source[at..];
    let start = at + rest.len() - rest.trim_start().len();
    let rest = &source[start..];
    let end = rest.find(|it: char| it.is_whitespace() || "()[]{},:".contains(it));
    let len = match end {
        Some(0) => 1,
        Some(end) => end,
        None => rest.len(),
    };
    start..start + len
}

/// The name that ends right before `at`, if nothing else stands there.
fn word_before(source: &str, at: usize) -> Option<Range<usize>> {
    let is_word = |it: char| it.is_alphanumeric() || it == '_';
    let end = source[..at].trim_end().len();
    let start = source[..end]
        .rfind(|it| !is_word(it))
        .map_or(0, |it| it + source[it..].chars().next().map_or(0, char::len_utf8));
    let ends = !source[at..].starts_with(is_word);
    (start < end && ends).then_some(start..end)
}

/// What a closed list of words is a list of.
fn noun(owner: &str) -> String {
    match owner {
        "Function" => "activation".to_string(),
        "AmaxAlgo" => "amax algorithm".to_string(),
        "Fp8Format" => "FP8 format".to_string(),
        "OptimizerSpec" => "optimizer".to_string(),
        "PlacementSpec" | "ValuePlacement" => "placement".to_string(),
        "ParallelMode" => "parallel mode".to_string(),
        "ReduceOp" => "reduction".to_string(),
        "Names" => "naming scheme".to_string(),
        _ => owner.to_lowercase(),
    }
}

pub(super) fn lower(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |it| it.to_lowercase().chain(chars).collect())
}

/// "did you mean" for a near miss, and the list otherwise.
fn suggest(found: &str, known: &[String]) -> String {
    match nearest(found, known) {
        Some(near) => format!("did you mean `{near}`?"),
        None if known.is_empty() => "there are none here".to_string(),
        None => format!("one of {}", known.join(", ")),
    }
}

/// The word that is nearest to `found`, if it is near enough to be what was meant.
pub(super) fn nearest<'a>(found: &str, known: &'a [String]) -> Option<&'a str> {
    let lower = found.to_lowercase();
    let scored = known.iter().map(|it| (distance(&lower, &it.to_lowercase()), it));
    let (score, best) = scored.min_by_key(|it| it.0)?;
    let n = found.chars().count();
    let most = n.max(best.chars().count());
    // A word of two letters is matched only if both letters agree: `pt` suggests `tp`, `cp` does not
    // suggest `dp`.
    let told = most > 2 || letters(&lower) == letters(&best.to_lowercase());
    (told && score <= 1 + most / 3 && score < n).then_some(best.as_str())
}

/// The letters of a word, in alphabetical order.
fn letters(word: &str) -> Vec<char> {
    let mut res: Vec<char> = word.chars().collect();
    res.sort_unstable();
    res
}

/// Edits (insert, delete, replace, swap two neighbours) between two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replace.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(found: &str, known: &[&str], expect: Option<&str>) {
        let known: Vec<String> = known.iter().map(|it| it.to_string()).collect();
        assert_eq!(nearest(found, &known), expect);
    }

    #[test]
    fn suggests_near_misses_only() {
        check("pt", &["dp", "tp"], Some("tp"));
        check("tpp", &["dp", "tp"], Some("tp"));
        check("dp_shrad", &["dp", "dp_shard", "tp"], Some("dp_shard"));
        check("kv_head", &["heads", "kv_heads"], Some("kv_heads"));
        check("zzzzz", &["dp", "tp"], None);
        check("cp", &["dp", "tp"], None);
        check("DP", &["dp", "tp"], Some("dp"));
        check("d", &["dp", "tp"], None);
        check("x", &[], None);
    }
}
