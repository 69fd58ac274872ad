//! The text form of programs: one syntax for files, dumps, filetests and bug reports.
//!
//! ```text
//! graph @mlp phase=explicit mesh=(dp=2, tp=4) {
//!   input %x : bf16[32, 1024] @ [dp, _] pinned
//!   param %up : bf16[4096, 1024] @ [tp.dp, _] pinned init=Normal(mean:0.0,std:0.02) full=%up.full
//!   forward:
//!   %up.full = all_gather(dp) %up : bf16[4096, 1024] @ [tp, _]
//!   %h = matmul(transpose_b:true) %x, %up.full : bf16[32, 4096] @ [dp, tp]
//! }
//! ```
//!
//! `docs/ir.md` has the grammar. What is printed is stable: program order, names of the model, nothing
//! that equals its default, no order of a hash map. Parsing what was printed gives the same program:
//! every plan is equal, and a graph is equal in all that is live (nodes and values that are no longer
//! part of the program are not printed).
//!
//! The parser refuses what cannot be represented: unknown and duplicate names, numbers of results that
//! do not match, buffers outside their arena. What a program *means* is for the verifier; so a file
//! may say `%b = add %a, %c` with operands that do not fit, or use a value before it is made.

mod lex;
mod parse;
mod print;

use std::fmt;
use std::ops::Range;

use ron::extensions::Extensions;

use crate::digest::Digest;
use crate::ops::Body;
use crate::plan::Plan;
use crate::{Graph, Phase, Section};

pub(crate) use print::plan_without_digest;
pub use print::{print_graph, print_plan};

/// Text that is no program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ParseError {
    /// Bytes at fault.
    pub span: Range<usize>,
    /// Line of the first of them, from 1.
    pub line: u32,
    /// Column of the first of them in characters, from 1.
    pub column: u32,
    /// What is wrong, and what was expected.
    pub message: String,
}

/// What a file may hold.
#[derive(Debug, Clone)]
pub enum Program {
    /// `graph @name ... { ... }`
    Graph(Graph),
    /// `plan @name ... { ... }`
    Plan(Plan),
}

/// Reads a graph or a plan.
pub fn parse(text: &str) -> Result<Program, ParseError> {
    parse::Parser::new(text).program()
}

/// Reads a graph; inverse of [`print_graph`].
pub fn parse_graph(text: &str) -> Result<Graph, ParseError> {
    match parse(text)? {
        Program::Graph(graph) => Ok(graph),
        Program::Plan(_) => Err(lex::Cursor::new(text).wrong_kind("a graph", "a plan")),
    }
}

/// Reads a plan; inverse of [`print_plan`]. A plan that was edited is of no known model: its `model` line is believed
/// only if its `digest` line is that of the text.
pub fn parse_plan(text: &str) -> Result<Plan, ParseError> {
    match parse(text)? {
        Program::Plan(plan) => Ok(plan),
        Program::Graph(_) => Err(lex::Cursor::new(text).wrong_kind("a plan", "a graph")),
    }
}

/// Reads a [`Body`] on one line, with `;` between its steps; inverse of its `to_string`.
pub(crate) fn parse_body(text: &str) -> Result<Body, ParseError> {
    // In a program a `;` starts a comment; what follows it here is the next line.
    parse::Parser::new(&text.replace(';', "\n")).only_body()
}

/// The digest that the text of a plan has of itself, if it has one. It is not that of the plan if somebody edited it.
pub fn stated_digest(text: &str) -> Option<Digest> {
    let line = text.lines().find_map(|it| it.trim_start().strip_prefix("digest "))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns true if the text of a plan names the digest of a model.
pub fn states_model(text: &str) -> bool {
    text.lines().any(|it| it.trim_start().starts_with("model "))
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print_graph(self))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print_plan(self))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Program::Graph(graph) => graph.fmt(f),
            Program::Plan(plan) => plan.fmt(f),
        }
    }
}

/// Phases and their spelling.
const PHASES: [(Phase, &str); 7] = [
    (Phase::Logical, "logical"),
    (Phase::Sharded, "sharded"),
    (Phase::Explicit, "explicit"),
    (Phase::Local, "local"),
    (Phase::Lowered, "lowered"),
    (Phase::Scheduled, "scheduled"),
    (Phase::Planned, "planned"),
];

/// Sections of a graph and their spelling.
const SECTIONS: [(Section, &str); 4] = [
    (Section::Prepare, "prepare"),
    (Section::Forward, "forward"),
    (Section::Backward, "backward"),
    (Section::Update, "update"),
];

fn section_name(section: Section) -> &'static str {
    SECTIONS[section as usize].1
}

/// How data with a RON form is written: `recipe=DelayedScaling(margin:1)`, with one pair of brackets.
fn ron_options() -> ron::Options {
    ron::Options::default().with_default_extension(Extensions::UNWRAP_VARIANT_NEWTYPES)
}

/// Characters of names that need no quotes.
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'/' | b'[' | b']')
}

#[cfg(test)]
mod tests;
