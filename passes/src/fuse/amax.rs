//! The amax of a tensor, which what makes it takes on the way.
//!
//! ```text
//! %y = glu %gate, %up          %y, %y.amax = @glu+amax %gate, %up
//! %y.amax = amax %y
//! ```
//!
//! Whatever else reads the tensor still does. A rank must hold one piece of it, as kernels take one maximum.

use ir::ops::Amax;
use ir::{Node, Op};

use super::{Joined, Walk};

impl Walk<'_> {
    pub(super) fn amax(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let Op::Amax(Amax { pieces }) = &data.op else { return };
        let (x, result, pieces) = (data.inputs[0], data.results[0], pieces.clone());
        if !self.is_of_one_piece(node) {
            return;
        }
        let Some((maker, of)) = self.maker(x, node) else { return };
        let index = self.graph.nodes[maker].results.len();
        let Some(amaxes) = self.graph.nodes[maker].op.amaxes_mut() else {
            let joined = Joined::of(self.graph, maker).and_then(|it| it.then(self.graph, node));
            if joined.is_some_and(|it| self.become_joined(maker, it)) {
                self.n_reads[x] -= 1;
                self.remove(node);
            }
            return;
        };
        let joins = amaxes.is_none() || amaxes.pieces == pieces;
        if of > 0 || !joins || amaxes.of.contains(&of) {
            return;
        }
        amaxes.of.push(of);
        amaxes.pieces = pieces;
        self.n_reads[x] -= 1;
        self.insert(result, maker, index);
        self.remove(node);
    }

    /// Returns true if an amax is of one piece on each rank.
    pub(super) fn is_of_one_piece(&self, node: Node) -> bool {
        let result = self.graph.nodes[node].results[0];
        let counts = &self.graph.ty(result).shape;
        self.graph.sharding(result).local_elements(counts, &self.graph.mesh) == 1
    }
}
