//! Passes over [`ir::Graph`] and [`ir::plan::Plan`], one file each, and the manager that verifies and
//! dumps between them.

mod pass;

pub mod autodiff;
pub mod insert_collectives;
pub mod propagate_shardings;

pub use autodiff::Autodiff;
pub use insert_collectives::InsertCollectives;
pub use pass::{Dump, Ir, Pass, PassError, PassManager};
pub use propagate_shardings::PropagateShardings;
