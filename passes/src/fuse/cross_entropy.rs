//! A cross entropy and its gradient: one op, where no rank holds but a part of the vocabulary.
//!
//! ```text
//! %m = ce_max %logits
//! %sumexp, %target = ce_stats %logits, %labels, %m
//! %sum, %count = ce_loss %m, %sumexp, %target, %labels
//! backward:
//! %one = fill(value:1.0)                                     %sum, %count, %dlogits =
//! %dsumexp, %dtarget = ce_loss_grad %sumexp, %labels, %one     cross_entropy %logits, %labels
//! %dlogits = ce_stats_grad %logits, %labels, %m, %dsumexp, %dtarget
//! ```
//!
//! It stays in the forward pass, where its loss is, and the gradient takes the place of the logits:
//! so nothing else may read them. Where a collective lies between two parts, or the backward pass
//! computes one of them again, a value is another one, and the parts stay.

use ir::ops::{CrossEntropy, Number};
use ir::{Node, Op, Value};

use super::Walk;

/// The nodes of a cross entropy but for the gradient of its statistics, and what they share.
struct Parts {
    max: Node,
    stats: Node,
    loss: Node,
    loss_grad: Node,
    seed: Node,
    logits: Value,
    labels: Value,
    op: CrossEntropy,
}

impl Walk<'_> {
    /// `node` is a `ce_stats_grad`.
    pub(super) fn cross_entropy(&mut self, node: Node) {
        let Some(parts) = self.parts(node) else { return };
        let dlogits = self.graph.nodes[node].results[0];
        let seed = self.graph.nodes[parts.seed].results[0];
        let loss = &mut self.graph.nodes[parts.loss];
        loss.op = parts.op.into();
        loss.inputs = [parts.logits, parts.labels].into_iter().collect();
        self.hand_over(dlogits, parts.loss, 2);
        for gone in [parts.max, parts.stats, parts.loss_grad, node] {
            self.remove(gone);
        }
        self.n_reads[seed] -= 1;
        if self.n_reads[seed] == 0 {
            self.remove(parts.seed);
        }
    }

    fn parts(&self, node: Node) -> Option<Parts> {
        let graph = &*self.graph;
        let data = &graph.nodes[node];
        let (Op::CeStatsGrad(stats_grad), &[logits, labels, m, dsumexp, dtarget]) =
            (&data.op, &data.inputs[..])
        else {
            return None;
        };

        let loss_grad = graph.producer(dsumexp)?;
        let grad = &graph.nodes[loss_grad];
        let (Op::CeLossGrad(grad_op), &[sumexp, grad_labels, dloss]) = (&grad.op, &grad.inputs[..])
        else {
            return None;
        };
        let seed = graph.producer(dloss)?;
        let Op::Fill(seed_op) = &graph.nodes[seed].op else { return None };

        let stats = graph.producer(sumexp)?;
        let stats_data = &graph.nodes[stats];
        let Op::CeStats(stats_op) = &stats_data.op else { return None };
        let &[of_sumexp, target] = &stats_data.results[..] else { return None };
        let max = graph.producer(m)?;
        let Op::CeMax(_) = graph.nodes[max].op else { return None };
        let loss = *self.readers[target].last()?;
        let loss_data = &graph.nodes[loss];
        let Op::CeLoss(loss_op) = &loss_data.op else { return None };

        let connected = grad.results[..] == [dsumexp, dtarget]
            && grad_labels == labels
            && of_sumexp == sumexp
            && stats_data.inputs[..] == [logits, labels, m]
            && graph.nodes[max].inputs[..] == [logits]
            && loss_data.inputs[..] == [m, sumexp, target, labels];
        let reads = [(logits, 3), (m, 3), (sumexp, 2), (target, 1), (dsumexp, 1), (dtarget, 1)];
        let alone = reads.iter().all(|&(value, n)| self.n_reads[value] == n);
        let alike = grad_op.ignore_index == loss_op.ignore_index
            && stats_grad.label_smoothing == stats_op.label_smoothing
            && seed_op.value == Number(1.0);
        let op = CrossEntropy {
            ignore_index: loss_op.ignore_index,
            label_smoothing: stats_op.label_smoothing,
        };
        let parts = Parts { max, stats, loss, loss_grad, seed, logits, labels, op };
        (connected && alone && alike).then_some(parts)
    }
}
