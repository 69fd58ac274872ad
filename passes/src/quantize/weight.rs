//! Weights that are stored as codes.
//!
//! ```text
//! weight             f32  [tp.dp, _]   master
//! weight.compute     e4m3 [tp.dp, _]   state, quantized in `Prepare` and behind the optimizer
//! weight.scale_inv   f32  []           state
//! weight.full        e4m3 [tp, _]      gathered codes
//! ```
//!
//! Under delayed scaling `weight.amax` is a state, too: that of the present weight, which the history takes
//! in before the next is quantized. All that `Prepare` makes follows from states, so it may run again.

use ir::graph::{Def, Store};
use ir::ops::{Amax, DelayedScale, Granule};
use ir::placement::Sharding;
use ir::quant::{QuantSpec, Scaling};
use ir::{BuildError, DType, Op, Section, TensorType, Value};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::tensor::delayed;
use super::{Codes, Copy, Walk, fp8, quantize};

/// A weight that is stored as codes.
#[derive(Debug, Clone)]
pub(super) struct Weight {
    param: usize,
    spec: QuantSpec,
    scale_inv: Value,
    /// States under delayed scaling: history, scale, amax.
    delayed: Option<[Value; 3]>,
}

impl Walk<'_> {
    /// Makes the states of weights codes, and lets gathers move these. Returns what made the numbers that
    /// were there before, which nothing needs any more.
    pub(super) fn store_codes(&mut self) -> FxHashSet<Value> {
        let mut computed = FxHashSet::default();
        for param in 0..self.gemms.weights.len() {
            let Some(spec) = self.gemms.weights[param] else { continue };
            if !spec.scaling.is_per_tensor() {
                computed.insert(self.store_blocks(param, spec));
                continue;
            }
            computed.insert(self.compute_state(param, fp8(spec.format)));
            let graph = &*self.builder.graph;
            let data = graph.params[param].clone();
            let name = graph.values[data.value].name.clone();
            let scale_inv = self.scalar(&format!("{name}.scale_inv"), DType::F32);
            let delayed = match spec.scaling {
                // What is not trained has no history.
                Scaling::Delayed { history, .. } if data.trainable => {
                    let [history, scale] = self.delayed_states(&name, history);
                    let master = self.builder.graph.ty(data.value).dtype;
                    Some([history, scale, self.scalar(&format!("{name}.amax"), master)])
                }
                _ => None,
            };
            let rows = Copy { codes: data.full, scale_inv, granule: Granule::default() };
            self.codes.insert((data.full, spec), Codes { rows: Some(rows), columns: None });
            self.weights.push(Weight { param, spec, scale_inv, delayed });
        }
        let sources: FxHashMap<Value, usize> =
            self.blocks.iter().enumerate().map(|(i, it)| (it.source, i)).collect();
        let mut casts = FxHashSet::default();
        self.builder.graph.stores.retain(|it| {
            let stale = computed.contains(&it.state);
            if let Some(&block) = sources.get(&it.state) {
                self.blocks[block].numbers.push((it.section, it.value));
            } else if stale {
                casts.insert(it.value);
            }
            !stale
        });
        casts
    }

    /// The state of a weight, which holds `to` from here on, and is what is gathered.
    pub(super) fn compute_state(&mut self, param: usize, to: DType) -> Value {
        let graph = &mut *self.builder.graph;
        let data = graph.params[param].clone();
        let compute = match data.compute == data.value {
            false => data.compute,
            true => {
                let name = format!("{}.compute", graph.values[data.value].name);
                let ty = graph.ty(data.value).with_dtype(to);
                let storage = graph.values[data.value].sharding.clone();
                let state = self.builder.leaf(&name, ty, Def::State);
                if let Some(storage) = storage {
                    self.builder.pin(state, storage);
                }
                state
            }
        };
        let graph = &mut *self.builder.graph;
        graph.params[param].compute = compute;
        graph.values[compute].ty.dtype = to;
        graph.values[data.full].ty.dtype = to;
        let gather =
            graph.producer(data.full).expect("a weight that is stored as codes is gathered");
        graph.nodes[gather].inputs[0] = compute;
        compute
    }

    /// A state of one number.
    fn scalar(&mut self, name: &str, dtype: DType) -> Value {
        let state = self.builder.leaf(name, TensorType::scalar(dtype), Def::State);
        self.builder.pin(state, Sharding::replicated(0));
        state
    }

    /// Quantizes all weights: those that `Update` trained, or all in `Prepare`. First all amaxes, so that
    /// they are reduced together.
    pub(super) fn quantize_weights(&mut self, section: Section) -> Result<(), BuildError> {
        let mut masters: SmallVec<[(Weight, Value, Value); 8]> = SmallVec::new();
        let stores = self.builder.graph.stores.iter().filter(|it| it.section == section);
        let next: FxHashMap<Value, Value> = stores.map(|it| (it.state, it.value)).collect();
        for weight in self.weights.clone() {
            let graph = &self.builder.graph;
            let param = &graph.params[weight.param];
            let master = match section {
                Section::Prepare => Some(param.value),
                _ => next.get(&param.value).copied(),
            };
            let Some(master) = master else { continue };
            self.builder.scope = param.scope;
            let name = self.weight_name(&weight, section, "amax");
            let amax = self.builder.op(&name, Amax::default(), &[master])?;
            masters.push((weight, master, amax));
        }
        let mut scaled: SmallVec<[[Value; 2]; 8]> = SmallVec::new();
        for (weight, _, amax) in &masters {
            self.builder.scope = self.builder.graph.params[weight.param].scope;
            scaled.push(self.weight_scale(weight, *amax, section)?);
        }
        for ((weight, master, _), [scale, scale_inv]) in masters.into_iter().zip(scaled) {
            let compute = self.builder.graph.params[weight.param].compute;
            self.builder.scope = self.builder.graph.params[weight.param].scope;
            let name = self.weight_name(&weight, section, "codes");
            let codes = self.builder.op(&name, quantize(weight.spec), &[master, scale])?;
            for (state, value) in [(compute, codes), (weight.scale_inv, scale_inv)] {
                self.builder.graph.stores.push(Store { state, value, section });
            }
        }
        Ok(())
    }

    /// The scale of a weight and its inverse.
    fn weight_scale(
        &mut self,
        weight: &Weight,
        amax: Value,
        section: Section,
    ) -> Result<[Value; 2], BuildError> {
        let base = self.name(self.builder.graph.params[weight.param].value);
        let Some([history, scale, last]) = weight.delayed else {
            let name = if section == Section::Update { format!("{base}.next") } else { base };
            return self.scale_of(&name, amax, weight.spec);
        };
        let mut now = scale;
        if section == Section::Update {
            let names = ["amax_history", "scale"].map(|it| format!("{base}.{it}.next"));
            let op: Op = delayed(weight.spec).0.into();
            let next = self.builder.ops(&[&names[0], &names[1]], op, &[history, last, scale])?;
            for (state, &value) in [history, scale].into_iter().zip(&next) {
                self.builder.graph.stores.push(Store { state, value, section });
            }
            now = next[1];
        }
        self.builder.graph.stores.push(Store { state: last, value: amax, section });
        let names = ["scale.now", "scale_inv"].map(|it| self.weight_name(weight, section, it));
        let res = self.builder.ops(&[&names[0], &names[1]], DelayedScale {}, &[now])?;
        Ok([res[0], res[1]])
    }

    fn weight_name(&self, weight: &Weight, section: Section, suffix: &str) -> String {
        let name = self.name(self.builder.graph.params[weight.param].value);
        let next = if section == Section::Update { ".next" } else { "" };
        format!("{name}{next}.{suffix}")
    }
}
