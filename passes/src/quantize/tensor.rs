//! Scales of whole tensors: current and delayed scaling.

use ir::graph::{Def, Store};
use ir::ops::{Amax, DelayedScale, DelayedUpdate, Number, QuantScale};
use ir::placement::Sharding;
use ir::quant::{QuantSpec, Scaling};
use ir::{BuildError, DType, Section, TensorType, Value};

use super::{Walk, fp8};

/// The state of a tensor under delayed scaling, which is still to be updated.
pub(super) struct History {
    name: String,
    op: DelayedUpdate,
    history: Value,
    amax: Value,
    scale: Value,
}

impl Walk<'_> {
    /// The scale of `value` from its own amax, and its inverse.
    pub(super) fn current_scale(
        &mut self,
        name: &str,
        value: Value,
        spec: QuantSpec,
    ) -> Result<[Value; 2], BuildError> {
        let amax = self.builder.op(&format!("{name}.amax"), Amax::default(), &[value])?;
        self.scale_of(name, amax, spec)
    }

    /// The scale of an amax, and its inverse.
    pub(super) fn scale_of(
        &mut self,
        name: &str,
        amax: Value,
        spec: QuantSpec,
    ) -> Result<[Value; 2], BuildError> {
        let (pow2, epsilon) = match spec.scaling {
            Scaling::Current { pow2, epsilon } => (pow2, epsilon),
            // Of a frozen weight: its history would be that of one amax, and it needs no margin.
            Scaling::Delayed { .. } => (false, Number::default()),
            _ => unreachable!("other scalings are no scale of a tensor"),
        };
        let op = QuantScale { to: fp8(spec.format), pow2, epsilon };
        let names = [format!("{name}.scale"), format!("{name}.scale_inv")];
        let res = self.builder.ops(&[&names[0], &names[1]], op, &[amax])?;
        Ok([res[0], res[1]])
    }

    /// The scale of `value` from its history, and its inverse. The history takes its amax in at the end of
    /// the section, and is stored at the end of the micro-batch, so that what is recomputed sees it as it was.
    pub(super) fn delayed_scale(
        &mut self,
        name: &str,
        value: Value,
        spec: QuantSpec,
    ) -> Result<[Value; 2], BuildError> {
        let (op, length) = delayed(spec);
        let [history, scale] = self.delayed_states(name, length);
        let names = [format!("{name}.scale.now"), format!("{name}.scale_inv")];
        let res = self.builder.ops(&[&names[0], &names[1]], DelayedScale {}, &[scale])?;
        let amax = self.builder.op(&format!("{name}.amax"), Amax::default(), &[value])?;
        self.histories.push(History { name: name.to_string(), op, history, amax, scale });
        Ok([res[0], res[1]])
    }

    /// The states `NAME.amax_history` and `NAME.scale`.
    pub(super) fn delayed_states(&mut self, name: &str, length: u32) -> [Value; 2] {
        let history = TensorType::new(DType::F32, &[u64::from(length)]);
        let states = [("amax_history", history), ("scale", TensorType::scalar(DType::F32))];
        states.map(|(suffix, ty)| {
            let sharding = Sharding::replicated(ty.ndim());
            let state = self.builder.leaf(&format!("{name}.{suffix}"), ty, Def::State);
            self.builder.pin(state, sharding);
            state
        })
    }

    /// Takes the amaxes of a section into their histories, all at once.
    pub(super) fn update_histories(&mut self) -> Result<(), BuildError> {
        for History { name, op, history, amax, scale } in std::mem::take(&mut self.histories) {
            let names = [format!("{name}.amax_history.next"), format!("{name}.scale.next")];
            let inputs = [history, amax, scale];
            let next = self.builder.ops(&[&names[0], &names[1]], op, &inputs)?;
            for (state, value) in [history, scale].into_iter().zip(next) {
                let section = Section::Backward;
                self.builder.graph.stores.push(Store { state, value, section });
            }
        }
        Ok(())
    }
}

/// The update of a tensor under delayed scaling, and the length of its history.
pub(super) fn delayed(spec: QuantSpec) -> (DelayedUpdate, u32) {
    let Scaling::Delayed { margin, history, algo } = spec.scaling else {
        unreachable!("only delayed scaling has a history")
    };
    (DelayedUpdate { to: fp8(spec.format), margin, algo }, history)
}
