//! A sum of what GEMMs and gradients of norms make: each is made onto the sum of those before.
//!
//! ```text
//! %a = matmul %x, %u            %a = matmul %x, %u
//! %b = matmul %y, %v            %s = matmul(accumulate:true) %y, %v, %a
//! %s = add %a, %b
//! ```

use ir::ops::Matmul;
use ir::{Node, Op, Value};
use smallvec::SmallVec;

use super::{Place, Walk};

/// An operand of a sum that can be made onto the others.
#[derive(Clone, Copy)]
struct Link {
    value: Value,
    maker: Node,
    place: Place,
    /// Its maker has no other result, so it may run later.
    moves: bool,
}

impl Walk<'_> {
    pub(super) fn add(&mut self, node: Node) {
        if self.pads(node) {
            return;
        }
        let Some((mut sum, links)) = self.chain(node) else { return };
        let result = self.graph.nodes[node].results[0];
        let (at, _) = self.place(node);
        self.remove(node);
        for (link, n) in links.iter().zip(1..) {
            if self.since(sum) > link.place {
                self.places[link.maker] = Some((at, n));
            }
            self.make_onto(link.maker, sum);
            sum = link.value;
        }
        let last = links.last().expect("a chain has a link");
        self.hand_over(result, last.maker, 0);
    }

    /// An operand of the sum, and the others as links, in the order in which they are made onto it:
    /// first those that can stay where they are.
    fn chain(&self, node: Node) -> Option<(Value, SmallVec<[Link; 4]>)> {
        let inputs = &self.graph.nodes[node].inputs;
        let (mut links, mut rest) = (SmallVec::<[Link; 4]>::new(), None);
        for &input in inputs {
            match self.link(input, node) {
                Some(link) => links.push(link),
                None if rest.replace(input).is_some() => return None,
                None => (),
            }
        }
        links.sort_by_key(|it| it.place);
        let sum = match rest {
            Some(rest) => rest,
            None => links.remove(0).value,
        };
        let since = self.since(sum);
        if links.is_empty() || links.iter().any(|it| it.place < since && !it.moves) {
            return None;
        }
        links.sort_by_key(|it| (it.place < since, it.place));
        Some((sum, links))
    }

    fn link(&self, value: Value, reader: Node) -> Option<Link> {
        let (maker, index) = self.sole(value, reader)?;
        let result = self.graph.nodes[reader].results[0];
        let moves = match &self.graph.nodes[maker].op {
            Op::Matmul(it) if !it.accumulate && !it.gelu => true,
            Op::QuantMatmul(it) if !it.accumulate => true,
            Op::RmsNormGrad(it) if !it.residual && index == 0 => false,
            Op::LayerNormGrad(it) if !it.residual && index == 0 => false,
            _ => return None,
        };
        let same = self.graph.ty(value) == self.graph.ty(result);
        same.then(|| Link { value, maker, place: self.place(maker), moves })
    }

    /// Lets the op add its first result to `sum`.
    fn make_onto(&mut self, maker: Node, sum: Value) {
        let data = &mut self.graph.nodes[maker];
        match &mut data.op {
            Op::Matmul(Matmul { accumulate, .. }) => {
                *accumulate = true;
                data.inputs.insert(2, sum);
            }
            Op::QuantMatmul(it) => {
                it.accumulate = true;
                data.inputs.insert(4, sum);
            }
            Op::RmsNormGrad(it) => {
                it.residual = true;
                data.inputs.push(sum);
            }
            Op::LayerNormGrad(it) => {
                it.residual = true;
                data.inputs.push(sum);
            }
            _ => unreachable!("a link is made by one of these"),
        }
    }
}
