//! The verifier: what a program promises in its phase, checked after every pass.
//!
//! An error here is a bug of ours, never the user's. All errors are collected, each with its place, the
//! offending line and a sentence. [`graph`] and [`plan`] list the invariants.
//!
//! Identical layers make identical checks, so each distinct (op, types, shardings) is checked once.

pub mod graph;
mod op;
mod params;
pub mod plan;
mod property;

use std::fmt;

use crate::graph::{Name, Section};
use crate::plan::PlanSection;

pub use property::{Checked, Counts, NOT_PROVED, Proof, Property};

/// A broken invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {}{message}", prefix(.context))]
pub struct VerifyError {
    /// The property that does not hold; none of a graph, which has no such names.
    pub property: Option<Property>,
    /// Where.
    pub place: Place,
    /// The line of the program that is at fault; empty if it is none.
    pub context: String,
    /// What is wrong.
    pub message: String,
}

fn prefix(context: &str) -> String {
    if context.is_empty() { String::new() } else { format!("`{context}`: ") }
}

/// Where an invariant is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Not at one place.
    Program,
    /// At what a plan says of data and schedule.
    Run,
    /// At this position of [`crate::Graph::order`].
    Node {
        /// The node's section.
        section: Section,
        /// The position.
        index: usize,
    },
    /// At a value of a graph.
    Value(Name),
    /// At an instruction of a plan.
    Instruction {
        /// The section.
        section: PlanSection,
        /// Index in the section.
        index: usize,
    },
    /// At a buffer of a plan.
    Buffer(Name),
    /// At the init or the aliases of a parameter.
    Param(Name),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Program => f.write_str("program"),
            Place::Run => f.write_str("run"),
            Place::Node { section, index } => write!(f, "{section:?} node {index}"),
            Place::Value(name) => write!(f, "value %{name}"),
            Place::Instruction { section, index } => write!(f, "{} {index}", section.name()),
            Place::Buffer(name) => write!(f, "buffer %{name}"),
            Place::Param(name) => write!(f, "param %{name}"),
        }
    }
}
