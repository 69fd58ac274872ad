//! `CrossEntropy`: the loss of logits against the labels, vocabulary-parallel where the logits are.
//!
//! Logits in a narrow type are widened inside. The mean over all tokens of a step is taken later,
//! so the results are a sum and a count. Logits in pieces (`chunks` of `LmHead`) have one loss.

use super::{Common, ModuleDef};
use crate::Value;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::range::Fields;
use crate::ops::{Add, CeLoss, CeMax, CeStats, Number};

module! {
    /// See the [module docs](self).
    pub struct CrossEntropy {
        /// Label of tokens that do not count.
        #[serde(default = "default_ignore_index")]
        pub ignore_index: i64,
        /// The part of each label that is spread over the whole vocabulary.
        #[serde(default)]
        pub label_smoothing: f64,
    }
}

fn default_ignore_index() -> i64 {
    -100
}

impl ModuleDef for CrossEntropy {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.real("label_smoothing", self.label_smoothing, CeStats::LABEL_SMOOTHING)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let logits = !inputs.is_empty() && inputs.iter().all(|&it| cx.ty(it).ndim() > 0);
        let Some(labels) = cx.labels.filter(|_| logits) else {
            let (module, expected) = (cx.title(), "logits, whole or in pieces".to_string());
            return Err(cx.error("", Problem::Inputs { module, expected, found: inputs.len() }));
        };
        cx.builder.graph.run.ignore_index = self.ignore_index;
        let labels = cx.chunks("loss.labels", labels, inputs.len() as u64)?;
        let (mut sums, mut counts) = (Values::new(), Values::new());
        for (&logits, (part, labels)) in inputs.iter().zip(&labels) {
            let [sum, count] = self.loss(cx, part, logits, *labels)?;
            sums.push(sum);
            counts.push(count);
        }
        let loss = match sums.len() {
            1 => [sums[0], counts[0]],
            _ => [cx.op("loss.sum", Add {}, &sums)?, cx.op("loss.count", Add {}, &counts)?],
        };
        cx.builder.graph.results =
            vec![("loss_sum".into(), loss[0]), ("loss_count".into(), loss[1])];
        Ok(Values::from_slice(&loss))
    }
}

impl CrossEntropy {
    /// Sum of the losses of these tokens, and their number; names end in `part`.
    fn loss(
        &self,
        cx: &mut Cx<'_>,
        part: &str,
        logits: Value,
        labels: Value,
    ) -> Result<[Value; 2], ModelError> {
        let name = |it: &str| format!("loss.{it}{part}");
        let max = cx.op(&name("max"), CeMax {}, &[logits])?;
        let stats = CeStats { label_smoothing: Number(self.label_smoothing) };
        let names = [name("sumexp"), name("target")];
        let stats = cx.ops(&[&names[0], &names[1]], stats, &[logits, labels, max])?;
        let loss = CeLoss { ignore_index: self.ignore_index };
        let names = [name("sum"), name("count")];
        let loss = cx.ops(&[&names[0], &names[1]], loss, &[max, stats[0], stats[1], labels])?;
        Ok([loss[0], loss[1]])
    }
}
