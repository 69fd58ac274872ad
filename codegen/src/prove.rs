//! [`prove`]: all that is claimed of a plan.

use ir::plan::Plan;
use ir::verify::{self, Proof};

/// Proves a plan: [`ir::verify::plan::prove`], and that there are kernels for it.
pub fn prove(plan: &Plan) -> Proof {
    let mut proof = verify::plan::prove(plan);
    kernels::verify::prove(plan, &mut proof);
    proof
}
