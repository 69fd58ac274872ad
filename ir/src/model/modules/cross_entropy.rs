//! `CrossEntropy`: the loss of logits against the labels, vocabulary-parallel where the logits are.
//!
//! Logits in a narrow type are widened inside. The mean over all tokens of a step is taken later,
//! so the results are a sum and a count.

use super::{Common, ModuleDef};
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::range::Fields;
use crate::ops::{CeLoss, CeMax, CeStats, Number};

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
        fields.fraction("label_smoothing", self.label_smoothing)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let (Some(labels), [logits]) = (cx.labels, inputs.as_slice()) else {
            let (module, expected) = (cx.title(), "1 tensor, the logits".to_string());
            return Err(cx.error("", Problem::Inputs { module, expected, found: inputs.len() }));
        };
        let logits = *logits;
        cx.builder.graph.run.ignore_index = self.ignore_index;
        let max = cx.op("loss.max", CeMax {}, &[logits])?;
        let stats = CeStats { label_smoothing: Number(self.label_smoothing) };
        let stats = cx.ops(&["loss.sumexp", "loss.target"], stats, &[logits, labels, max])?;
        let loss = CeLoss { ignore_index: self.ignore_index };
        let loss = cx.ops(&["loss.sum", "loss.count"], loss, &[max, stats[0], stats[1], labels])?;
        cx.builder.graph.results =
            vec![("loss_sum".into(), loss[0]), ("loss_count".into(), loss[1])];
        Ok(Values::from_slice(&loss))
    }
}
