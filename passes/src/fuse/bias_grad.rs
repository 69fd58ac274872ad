//! The gradient of a bias, which what quantizes the gradient of the projection behind it sums on the way.
//!
//! ```text
//! %db = sum_leading %dy                     %dy.codes, %db = quantize(to:e5m2,sums:(of:[(0,bf16)])) %dy, %s
//! %dy.codes = quantize(to:e5m2) %dy, %s
//! ```
//!
//! The sum is that of what is quantized, as before; what makes `%dy` may then make the codes and sum what it computes
//! (`codes.rs`). It must not be needed before the codes are. Scales of blocks have no such form.

use ir::{Node, Op};

use super::Walk;

impl Walk<'_> {
    pub(super) fn bias_grad(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let x = data.inputs[0];
        let sums = |it: &&Node| matches!(self.graph.nodes[**it].op, Op::SumLeading(_));
        let Some(&sum) = self.readers[x].iter().find(sums) else { return };
        let result = self.graph.nodes[sum].results[0];
        let early = |it: &Node| self.places[*it].is_none_or(|it| it < self.place(node));
        let needed = self.readers[result].first().is_some_and(early);
        if self.graph.nodes[sum].section != data.section || needed {
            return;
        }
        let (index, dtype) = (data.results.len(), self.graph.ty(result).dtype);
        let Op::Quantize(op) = &mut self.graph.nodes[node].op else { return };
        op.sums.of.push((0, dtype));
        self.n_reads[x] -= 1;
        self.readers[x].retain(|it| *it != sum);
        self.hand_over(result, node, index);
        self.remove(sum);
    }
}
