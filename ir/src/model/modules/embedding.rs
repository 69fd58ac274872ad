//! `Embedding`: a row of a table for each token, vocabulary-parallel; the vocabulary may be uneven.

use smallvec::smallvec;

use super::{Common, ModuleDef};
use crate::graph::Init;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::params::{ParamSpec, Start};
use crate::model::range::Fields;
use crate::model::schema::ParamOptions;
use crate::ops;

module! {
    /// See the [module docs](self).
    pub struct Embedding {
        /// Rows of the table.
        pub vocab: u64,
        /// Features of a row.
        pub dim: u64,
        /// The row that is not trained.
        #[serde(default)]
        pub padding_idx: Option<i64>,
        /// How the table starts; the model's `init` by default.
        #[serde(default)]
        pub init: Option<Init>,
        /// Options of the table.
        #[serde(default)]
        pub weight: ParamOptions,
    }
}

impl ModuleDef for Embedding {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        fields.size("vocab", self.vocab)?;
        fields.size("dim", self.dim)?;
        if let Some(it) = self.padding_idx {
            let ok = u64::try_from(it).is_ok_and(|it| it < self.vocab);
            let expected = format!("at least 0 and below vocab, which is {}", self.vocab);
            fields.require(ok, "padding_idx", it, &expected)?;
        }
        fields.init("init", self.init)?;
        fields.options("weight", &self.weight)
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        let ids = match inputs.as_slice() {
            &[ids] if !cx.ty(ids).dtype.is_float() => ids,
            _ => {
                let (module, expected) = (cx.title(), "the tokens".to_string());
                return Err(cx.error("", Problem::Inputs { module, expected, found: inputs.len() }));
            }
        };
        cx.builder.graph.run.vocab = self.vocab;
        let shape = [self.vocab, self.dim];
        let start = Start::of("init", self.init, cx.model.init);
        let mut spec = ParamSpec::new("weight", &shape, start);
        spec.options = Some(("weight", &self.weight));
        let table = cx.param(spec.cut(0, cx.tp.cut()))?;
        let padding_idx = self.padding_idx;
        let rows = cx.op("", ops::Embedding { padding_idx }, &[ids, table])?;
        cx.pin_stream(rows)?;
        Ok(smallvec![rows])
    }
}
