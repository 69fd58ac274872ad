//! The gradient of a bias, which what quantizes the gradient of the projection behind it sums on the way.
//!
//! ```text
//! %db = sum_leading %dy                     %dy.codes, %db = @quantize+sum_leading %dy, %s
//! %db.sum = all_reduce(sum, dp) %db         %db.sum = all_reduce(sum, dp) %db
//! %dy.codes = quantize(to:e5m2) %dy, %s
//! ```
//!
//! The sum is that of what is quantized, as before; what makes `%dy` may then make the codes and sum what it computes
//! (`codes.rs`). What needs the sum moves behind the codes, which must not need it. Scales of blocks have no such form.

use ir::ops::SumLeading;
use ir::{Node, Op, Value};

use super::{Joined, Walk};

impl Walk<'_> {
    pub(super) fn bias_grad(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let x = data.inputs[0];
        let sums = |it: &&Node| matches!(self.graph.nodes[**it].op, Op::SumLeading(_));
        let Some(&sum) = self.readers[x].iter().find(sums) else { return };
        if self.graph.nodes[sum].section != data.section {
            return;
        }
        let result = self.graph.nodes[sum].results[0];
        let Some(early) = self.needed_before(result, node) else { return };
        // The sum keeps its type where it is of what is computed in f32.
        let out = Some(self.graph.ty(result).dtype);
        self.graph.nodes[sum].op = SumLeading { out }.into();
        let joined = Joined::of(self.graph, node).and_then(|it| it.then(self.graph, sum));
        if !joined.is_some_and(|it| self.become_joined(node, it)) {
            return;
        }
        let (at, last) = self.place(node);
        for (n, it) in (last + 1..).zip(early) {
            self.places[it] = Some((at, n));
        }
        self.n_reads[x] -= 1;
        self.readers[x].retain(|it| *it != sum);
        self.remove(sum);
    }

    /// What in front of `node` needs `value`, directly or not, in order; `None` if `node` does itself, or another node
    /// in place of one that is gone.
    fn needed_before(&self, value: Value, node: Node) -> Option<Vec<Node>> {
        let mut res = Vec::new();
        let mut values = vec![value];
        while let Some(value) = values.pop() {
            for &reader in &self.readers[value] {
                let place = self.places[reader].filter(|_| reader != node)?;
                if place < self.place(node) && !res.contains(&(place, reader)) {
                    res.push((place, reader));
                    values.extend(&self.graph.nodes[reader].results);
                }
            }
        }
        res.sort();
        Some(res.into_iter().map(|it| it.1).collect())
    }
}
