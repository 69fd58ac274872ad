//! `PositionEmbedding`: a learned row for each position, added to every sequence.

use smallvec::smallvec;

use super::{Common, ModuleDef};
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::params::ParamSpec;
use crate::model::schema::ParamOptions;
use crate::ops;

module! {
    /// See the [module docs](self).
    pub struct PositionEmbedding {
        /// Rows of the table: the longest sequence.
        pub positions: u64,
        /// How the table starts; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// Options of the table.
        #[serde(default)]
        pub weight: ParamOptions,
    }
}

impl ModuleDef for PositionEmbedding {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let x = cx.one(&inputs)?;
        if self.positions < cx.model.sequence {
            let (field, found) = ("positions".to_string(), self.positions.to_string());
            let expected = format!("at least the sequence, which is {}", cx.model.sequence);
            return Err(cx.error("positions", Problem::Range { field, found, expected }));
        }
        let shape = [self.positions, cx.width(x)];
        let mut spec = ParamSpec::new("weight", &shape, self.init.unwrap_or(cx.model.init));
        spec.options = Some(&self.weight);
        let table = cx.param(spec)?;
        let sum = cx.op("", ops::AddPosition {}, &[x, table])?;
        cx.pin_stream(sum)?;
        Ok(smallvec![sum])
    }
}
