//! Operands in blocks that have a scale each, and no amax that crosses ranks.
//!
//! ```text
//! weight               f32  [tp.dp, _]   master
//! weight.cast          bf16 [tp.dp, _]   what is quantized: the same numbers before and after a gather
//! weight.compute       e4m3 [tp.dp, _]   state
//! weight.scale_inv     f32  [tp.dp, _]   state, a number for each 128x128
//! weight.full          e4m3 [tp, _]      gathered codes
//! weight.scale_inv.full f32 [tp, _]      gathered scales
//! ```
//!
//! Where FSDP cuts through a block, the weight is gathered in its compute type and quantized behind. Where
//! tensor parallelism does, the GEMM is not quantized. Activations are quantized where `propagate-shardings`
//! finds it cheapest; its factors keep blocks whole, so a cut through them is undone before.
//!
//! MXFP8 and NVFP4 are emulated: what is stored, gathered and multiplied is not codes but the numbers that
//! they stand for, in the compute type.

use ir::graph::{Def, Store, ValueData};
use ir::ops::{Along, Copies, Granule, QuantizeBlock, Reshard};
use ir::placement::{Mesh, Sharding};
use ir::quant::blocks::FP8_BLOCK;
use ir::quant::{QuantSpec, Scaling};
use ir::{BuildError, DType, Node, Section, TensorType, Value};
use smallvec::SmallVec;

use super::{Codes, Copy, Walk, fp8};

/// A weight whose blocks are quantized where it is stored.
#[derive(Debug, Clone)]
pub(super) struct BlockWeight {
    param: usize,
    spec: QuantSpec,
    /// State of inverse scales; `None` if it is stored as numbers.
    scale_inv: Option<Value>,
    /// The state of which all that is stored is quantized.
    pub(super) source: Value,
    /// What is quantized, and when.
    pub(super) numbers: SmallVec<[(Section, Value); 2]>,
}

/// Rows and columns of a block, if there are blocks.
pub(crate) fn block(scaling: Scaling) -> Option<[u64; 2]> {
    match scaling {
        Scaling::Current { .. } | Scaling::Delayed { .. } => None,
        Scaling::Block { rows, columns, .. } => Some([rows.into(), columns.into()]),
        Scaling::Mx { two_dimensional } => Some([if two_dimensional { 32 } else { 1 }, 32]),
        Scaling::NvFp4 { two_dimensional, .. } => Some([if two_dimensional { 16 } else { 1 }, 16]),
    }
}

/// Dims of a tensor of `ndim` that are cut into blocks, in the copy of its rows or of its columns.
fn block_dims(block: [u64; 2], ndim: usize, columns: bool) -> impl Iterator<Item = usize> {
    let square = block[0] > 1;
    [(square || columns).then(|| ndim - 2), (square || !columns).then(|| ndim - 1)]
        .into_iter()
        .flatten()
}

/// Why a tensor does not fall into whole blocks on every coordinate, where it is laid out as `sharding` if that is
/// fixed, as it is of weights.
pub(super) fn misfit(
    data: &ValueData,
    sharding: Option<&Sharding>,
    mesh: &Mesh,
    spec: QuantSpec,
    columns: bool,
) -> Option<String> {
    let block = block(spec.scaling)?;
    let size = block[1];
    block_dims(block, data.ty.ndim(), columns).find_map(|dim| {
        let (name, found) = (&data.name, data.ty.shape[dim]);
        if !found.is_multiple_of(size) {
            return Some(format!("dim {dim} of `{name}` has {found}, no multiple of {size}"));
        }
        let layout = &sharding?.dims[dim];
        let parts = layout.split(&[found / size, size], mesh);
        let whole = parts.is_some_and(|it| it[1].is_whole());
        let axes = mesh.names(layout.axis_set());
        (!whole)
            .then(|| format!("{axes} cut dim {dim} of `{name}`, {found}, within blocks of {size}"))
    })
}

/// Whether a weight can be quantized where it is stored, once for all its readers, if it is stored like this.
pub(crate) fn stays_whole(
    master: &ValueData,
    storage: Option<&Sharding>,
    mesh: &Mesh,
    spec: QuantSpec,
) -> bool {
    let Some(block) = block(spec.scaling) else { return true };
    block[0] > 1 && misfit(master, storage, mesh, spec, false).is_none()
}

impl Walk<'_> {
    /// Codes of `value`, where it is: of an activation or a gradient both copies, if both are read; of a
    /// weight the one that is needed, so that none is kept for the backward pass.
    pub(super) fn blocks(
        &mut self,
        value: Value,
        spec: QuantSpec,
        columns: bool,
    ) -> Result<Codes, BuildError> {
        let both = self.gemms.param[value].is_none()
            && self.gemms.copies.get(&(value, spec)) == Some(&[true, true]);
        let copies = match (both, columns) {
            (true, _) => Copies::Both,
            (false, true) => Copies::Columns,
            (false, false) => Copies::Rows,
        };
        let op = self.quantize_block(value, spec, copies);
        let granule = if op.square { Granule::Block } else { Granule::Row };
        let name = self.name(value);
        let suffixes: &[&str] = match copies {
            Copies::Rows => &["codes", "scale_inv"],
            Copies::Columns => &["codes_t", "scale_inv_t"],
            Copies::Both => &["codes", "scale_inv", "codes_t", "scale_inv_t"],
        };
        let names: Vec<String> = suffixes.iter().map(|it| format!("{name}.{it}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let made = self.builder.ops(&names, op, &[value])?;
        let mut made = made.chunks(2).map(|it| Copy {
            codes: it[0],
            scale_inv: it[1],
            granule: granule.clone(),
        });
        let rows = if copies.rows() { made.next() } else { None };
        Ok(Codes { rows, columns: made.next() })
    }

    fn quantize_block(&self, value: Value, spec: QuantSpec, copies: Copies) -> QuantizeBlock {
        let Scaling::Block { rows, pow2, .. } = spec.scaling else {
            unreachable!("only blocks of 128 are codes with scales")
        };
        let (to, from) = (fp8(spec.format), self.builder.graph.ty(value).dtype);
        QuantizeBlock { to, from, square: rows > 1, pow2, copies, uneven: false }
    }

    /// Makes the state of a weight codes, and adds one of scales; or lets it hold what codes stand for.
    /// Returns that state.
    pub(super) fn store_blocks(&mut self, param: usize, spec: QuantSpec) -> Value {
        let graph = &*self.builder.graph;
        let data = graph.params[param].clone();
        // Without a cast the master is what is quantized, and what replaces it.
        let mut numbers = SmallVec::new();
        if data.compute == data.value {
            numbers.push((Section::Prepare, data.value));
        }
        let codes = matches!(spec.scaling, Scaling::Block { .. });
        let to = if codes { fp8(spec.format) } else { graph.ty(data.compute).dtype };
        let compute = self.compute_state(param, to);
        let scale_inv = codes.then(|| self.block_scales(data.value));
        self.blocks.push(BlockWeight { param, spec, scale_inv, source: data.compute, numbers });
        compute
    }

    /// A state of the inverse scales of a weight in blocks of 128x128.
    fn block_scales(&mut self, master: Value) -> Value {
        let graph = &*self.builder.graph;
        let name = format!("{}.scale_inv", graph.values[master].name);
        let shape = graph.ty(master).shape.iter().map(|it| it / FP8_BLOCK).collect();
        let storage = self.scales_of(master);
        let state = self.builder.leaf(&name, TensorType { dtype: DType::F32, shape }, Def::State);
        if let Some(storage) = storage {
            self.builder.pin(state, storage);
        }
        state
    }

    /// The sharding of the scales of a matrix in blocks of 128x128 that no cut splits, if it has one itself.
    fn scales_of(&self, value: Value) -> Option<Sharding> {
        let (data, mesh) = (&self.builder.graph.values[value], &self.builder.graph.mesh);
        let dims = data.sharding.as_ref()?.dims.iter().zip(&data.ty.shape).map(|(layout, size)| {
            let parts = layout.split(&[size / FP8_BLOCK, FP8_BLOCK], mesh);
            parts.expect("no cut splits a block")[0].clone()
        });
        Some(Sharding { dims: dims.collect(), partial: None })
    }

    /// Gathers the scales of a weight as `node` gathers its codes, if it does.
    pub(super) fn gather_scales(&mut self, node: Node) -> Result<(), BuildError> {
        let graph = &*self.builder.graph;
        let full = graph.nodes[node].results[0];
        let Some(index) = self.gemms.param[full] else { return Ok(()) };
        let Some(weight) = self.blocks.iter().find(|it| it.param == index) else { return Ok(()) };
        let (spec, Some(state)) = (weight.spec, weight.scale_inv) else { return Ok(()) };
        let name = format!("{}.full", graph.values[state].name);
        let scale_inv = self.builder.op(&name, Reshard::default(), &[state])?;
        if let Some(sharding) = self.scales_of(full) {
            self.builder.pin(scale_inv, sharding);
        }
        let rows = Copy { codes: full, scale_inv, granule: Granule::Block };
        self.codes.insert((full, spec), Codes { rows: Some(rows), columns: None });
        Ok(())
    }

    /// Quantizes all weights in blocks: those that `Update` trained, or all in `Prepare`.
    pub(super) fn quantize_block_weights(&mut self, section: Section) -> Result<(), BuildError> {
        for BlockWeight { param, spec, scale_inv, numbers, .. } in self.blocks.clone() {
            let Some(&(_, value)) = numbers.iter().find(|it| it.0 == section) else { continue };
            let data = self.builder.graph.params[param].clone();
            self.builder.scope = data.scope;
            let next = if section == Section::Update { ".next" } else { "" };
            let name = format!("{}{next}", self.name(data.value));
            let Some(scale_inv) = scale_inv else {
                let value = self.round(&name, value, spec, Along::Square)?;
                self.builder.graph.stores.push(Store { state: data.compute, value, section });
                continue;
            };
            let names = ["codes", "scale_inv"].map(|it| format!("{name}.{it}"));
            let graph = &*self.builder.graph;
            let master = &graph.values[data.value];
            let parted = |it: &Sharding| !it.divides(&master.ty.shape, &graph.mesh);
            let uneven = master.sharding.as_ref().is_some_and(parted);
            let op = QuantizeBlock { uneven, ..self.quantize_block(value, spec, Copies::Rows) };
            let made = self.builder.ops(&[&names[0], &names[1]], op, &[value])?;
            for (state, value) in [data.compute, scale_inv].into_iter().zip(made) {
                self.builder.graph.stores.push(Store { state, value, section });
            }
        }
        Ok(())
    }
}
