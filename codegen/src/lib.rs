//! From a graph to a plan: the pipeline, and the step between the two.

mod lower;

pub use lower::lower;
