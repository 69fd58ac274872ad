//! The amax of a tensor, which what makes it takes on the way.
//!
//! ```text
//! %y = glu %gate, %up          %y, %y.amax = glu(amax:(of:[0])) %gate, %up
//! %y.amax = amax %y
//! ```
//!
//! Whatever else reads the tensor still does. A rank must hold one piece of it, as kernels take one maximum; and
//! all amaxes of a maker are of the same pieces.

use ir::ops::Amax;
use ir::{Node, Op};

use super::Walk;

impl Walk<'_> {
    pub(super) fn amax(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let Op::Amax(Amax { pieces }) = &data.op else { return };
        let (x, result, pieces) = (data.inputs[0], data.results[0], pieces.clone());
        let counts = &self.graph.ty(result).shape;
        if self.graph.sharding(result).local_elements(counts, &self.graph.mesh) != 1 {
            return;
        }
        let Some((maker, of)) = self.maker(x, node) else { return };
        let data = &mut self.graph.nodes[maker];
        let index = data.op.sums().before(&data.results).len();
        let is_observed = of < n_observed(&data.op);
        let Some(amaxes) = data.op.amaxes_mut() else { return };
        let joins = amaxes.is_none() || amaxes.pieces == pieces;
        if !is_observed || !joins || amaxes.of.contains(&of) {
            return;
        }
        amaxes.of.push(of);
        amaxes.pieces = pieces;
        self.n_reads[x] -= 1;
        self.insert(result, maker, index);
        self.remove(node);
    }
}

/// How many of an op's first results its kernels can give amaxes of, or codes.
pub(super) fn n_observed(op: &Op) -> usize {
    match op {
        Op::GluGrad(it) if it.recompute => 3,
        Op::GluGrad(_) => 2,
        _ => 1,
    }
}
