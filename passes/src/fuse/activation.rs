//! A `gelu_tanh` of what a GEMM makes: the GEMM activates on the way out, and gives both.
//!
//! ```text
//! %h = matmul(bias:true) %x, %w, %b          %y, %h = matmul(bias:true,gelu:true) %x, %w, %b
//! %y = activation(kind:gelu_tanh) %h
//! ```
//!
//! The sum is there as before, for whatever else reads it: the gradient, mostly. A partial sum is not
//! activated: between it and its activation is a collective.

use ir::ops::{Activation, ActivationKind};
use ir::{Node, Op};

use super::Walk;

impl Walk<'_> {
    pub(super) fn activation(&mut self, node: Node) {
        let Op::Activation(Activation { kind: ActivationKind::GeluTanh, .. }) =
            self.graph.nodes[node].op
        else {
            return;
        };
        let (sum, result) = (self.graph.nodes[node].inputs[0], self.graph.nodes[node].results[0]);
        let Some((maker, 0)) = self.maker(sum, node) else { return };
        match &mut self.graph.nodes[maker].op {
            Op::Matmul(it) if !it.accumulate && !it.gelu => it.gelu = true,
            _ => return,
        }
        self.n_reads[sum] -= 1;
        self.hand_over(result, maker, 0);
        self.hand_over(sum, maker, 1);
        self.remove(node);
    }
}
