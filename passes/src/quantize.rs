//! `quantize`: GEMMs of modules with a recipe multiply low-precision codes instead of numbers.
//!
//! ```text
//! %y = matmul %x, %w         %a = amax %x                        one number, whatever shards %x
//!                            %s, %i = quant_scale %a
//!                            %c = quantize %x, %s
//!                            %y = quant_matmul %c, %w, %i, %w.scale_inv
//! ```
//!
//! Quantization is ordinary ops, made after gradients and before shardings: `propagate-shardings` sees that
//! amax is a partial maximum, and that moving codes is cheaper than moving what they stand for. Which copy
//! feeds which GEMM is `te-spec` 1.7: rows of both for fprop, rows of the gradient and columns of the weight
//! for dgrad, columns of the gradient and of the input for wgrad.
//!
//! A weight is quantized in its storage layout, in `Prepare` and behind the optimizer, so its codes are a
//! state and what FSDP gathers. One that something else than quantized GEMMs reads (a tied embedding), or
//! whose blocks FSDP cuts, is quantized where it is gathered.
//!
//! A GEMM whose operands do not fall into whole blocks stays as it is; [`Graph::unquantized`] says why.

pub(crate) mod block;
mod emulate;
mod tensor;
mod weight;

use cranelift_entity::SecondaryMap;
use ir::graph::Name;
use ir::ops::{self, Along, Copies, Granule, Matmul, QuantMatmul, Transpose};
use ir::quant::{Format, GemmRole, QuantSpec, Role, Scaling};
use ir::{BuildError, Builder, DType, Graph, Node, Op, Phase, Section, Value};
use rustc_hash::FxHashMap;

use crate::{Pass, PassError};
use block::BlockWeight;
use tensor::History;
use weight::Weight;

/// See the [module docs](self).
pub struct Quantize;

impl Pass<Graph> for Quantize {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Logical, Phase::Logical)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let mut gemms = Gemms::find(graph)?;
        graph.unquantized.append(&mut gemms.skipped);
        for (data, stored) in graph.params.iter().zip(&mut gemms.weights) {
            let master = &graph.values[data.value];
            let storage = master.sharding.as_ref();
            *stored = stored.filter(|it| block::stays_whole(master, storage, &graph.mesh, *it));
        }
        if gemms.of.values().all(Option::is_none) {
            return Ok(());
        }
        let order = std::mem::take(&mut graph.order);
        let (builder, codes) = (Builder::new(graph), FxHashMap::default());
        let (histories, weights, blocks) = (Vec::new(), Vec::new(), Vec::new());
        let (rounded, seed) = (FxHashMap::default(), None);
        let mut walk = Walk { builder, gemms, codes, rounded, seed, histories, weights, blocks };
        walk.run(&order).map_err(|it| PassError::Failed {
            code: "PL0303",
            message: it.to_string(),
            subject: Some(it.name),
        })
    }
}

/// A GEMM that will be quantized.
#[derive(Debug, Clone, Copy)]
struct Gemm {
    role: GemmRole,
    /// How its operands are, as [`QuantMatmul`] takes them.
    specs: [QuantSpec; 2],
}

impl Gemm {
    /// Whether it reads the columns of an operand.
    fn columns(self, operand: usize) -> bool {
        match self.role {
            GemmRole::Fprop => false,
            GemmRole::Dgrad => operand == 1,
            GemmRole::Wgrad => true,
        }
    }
}

pub(crate) struct Gemms {
    of: SecondaryMap<Node, Option<Gemm>>,
    /// How the weight of a parameter may be stored, by index, if no cut goes through a block; `None` for one
    /// that something reads as it is.
    pub(crate) weights: Vec<Option<QuantSpec>>,
    /// The parameter that a value is, as modules read it.
    param: SecondaryMap<Value, Option<usize>>,
    /// Of each tensor and way to quantize it: whether rows and columns are read.
    copies: FxHashMap<(Value, QuantSpec), [bool; 2]>,
    /// What GEMMs make that a recipe wants quantized and that stay as they are, and why.
    skipped: Vec<(Name, String)>,
}

impl Gemms {
    /// What recipes say of the GEMMs of a graph with gradients.
    pub(crate) fn find(graph: &Graph) -> Result<Gemms, PassError> {
        let mut param = SecondaryMap::<Value, Option<usize>>::new();
        for (index, it) in graph.params.iter().enumerate() {
            param[it.full] = Some(index);
        }
        let mut res = Gemms {
            of: SecondaryMap::new(),
            weights: vec![None; graph.params.len()],
            copies: FxHashMap::default(),
            skipped: Vec::new(),
            param,
        };
        let mut readers: Vec<Vec<Option<QuantSpec>>> = vec![Vec::new(); graph.params.len()];
        // Weights of which fprop is `x W^T`.
        let mut linear: SecondaryMap<Value, bool> = SecondaryMap::new();
        for &node in &graph.order {
            let role = role(graph, node, &res.param, &linear);
            if let Some(GemmRole::Fprop) = role {
                linear[graph.nodes[node].inputs[1]] = true;
            }
            let gemm = match role {
                Some(role) => res.gemm(graph, node, role)?,
                None => {
                    res.report_other(graph, node);
                    None
                }
            };
            let data = &graph.nodes[node];
            res.of[node] = gemm;
            for (operand, &input) in data.inputs.iter().enumerate() {
                if let Some(index) = res.param[input] {
                    readers[index].push(gemm.map(|it| it.specs[operand]));
                }
            }
            let Some(gemm) = gemm else { continue };
            for (operand, (&input, spec)) in data.inputs.iter().zip(gemm.specs).enumerate() {
                let columns = gemm.columns(operand);
                res.copies.entry((input, spec)).or_default()[usize::from(columns)] = true;
            }
        }
        for (index, readers) in readers.iter().enumerate() {
            let first = readers.first().copied().flatten();
            let same = readers.iter().all(|it| *it == first);
            let data = &graph.params[index];
            let gathered = graph.producer(data.full).is_some() && data.aliases.is_empty();
            res.weights[index] = first.filter(|_| same && gathered);
        }
        Ok(res)
    }

    /// Reports a product with a weight that is no linear layer as PyTorch has it.
    fn report_other(&mut self, graph: &Graph, node: Node) {
        let data = &graph.nodes[node];
        let recipe = &graph.scopes[data.scope].recipe;
        let weight = data.inputs.iter().any(|&it| self.param[it].is_some());
        let wanted = Role::ALL.iter().any(|&it| recipe.spec(it).is_some());
        if matches!(data.op, Op::Matmul(_)) && weight && wanted {
            self.skip(
                graph,
                node,
                "only products with the transpose of a weight [out, in] are".into(),
            );
        }
    }

    /// The GEMM as its module's recipe wants it; `None` if it stays as it is.
    fn gemm(
        &mut self,
        graph: &Graph,
        node: Node,
        role: GemmRole,
    ) -> Result<Option<Gemm>, PassError> {
        let data = &graph.nodes[node];
        let (recipe, roles) = (&graph.scopes[data.scope].recipe, role.operands());
        let specs = match roles.map(|it| recipe.spec(it)) {
            [Some(a), Some(b)] => [a, b],
            [None, None] => return Ok(None),
            [a, _] => {
                let role = if a.is_none() { roles[0] } else { roles[1] };
                let why = format!("the recipe does not quantize its {}", role_name(role));
                self.skip(graph, node, why);
                return Ok(None);
            }
        };
        if let Some(why) = mismatch(specs) {
            let [a, b] =
                [0, 1].map(|it| format!("its {} ({})", role_name(roles[it]), spec_name(specs[it])));
            let module = graph.scopes[data.scope].path.clone();
            let gemm = gemm_name(role);
            return Err(PassError::Failed {
                code: "PL0304",
                message: format!("`{module}`: {gemm} cannot multiply {a} and {b}: {why}"),
                subject: Some(module),
            });
        }
        let gemm = Gemm { role, specs };
        for (operand, (&value, spec)) in data.inputs.iter().zip(specs).enumerate() {
            let of = &graph.values[value];
            let fixed = of.sharding.as_ref().filter(|_| self.param[value].is_some());
            let columns = gemm.columns(operand);
            if let Some(why) = block::misfit(of, fixed, &graph.mesh, spec, columns) {
                self.skip(graph, node, why);
                return Ok(None);
            }
        }
        Ok(Some(gemm))
    }

    /// Keeps in mind a GEMM that a recipe wants quantized and that is not.
    fn skip(&mut self, graph: &Graph, node: Node, why: String) {
        self.skipped.push((graph.values[graph.nodes[node].results[0]].name.clone(), why));
    }
}

/// What no GEMM does, if these operands ask for it.
fn mismatch(specs: [QuantSpec; 2]) -> Option<&'static str> {
    let [a, b] = specs.map(|it| it.scaling);
    let family = |it: Scaling| (it.is_per_tensor(), emulate::is_emulated(it));
    let square = |it| matches!(it, Scaling::Block { rows: 128, .. });
    if specs.iter().all(|it| it.format == Format::E5M2) {
        Some("give one of them E4M3")
    } else if family(a) != family(b) {
        Some("give both scales of whole tensors, of blocks of 128, or of blocks of 32 or 16")
    } else if square(a) && square(b) {
        Some("give one of them blocks of 1x128")
    } else {
        None
    }
}

fn gemm_name(role: GemmRole) -> &'static str {
    match role {
        GemmRole::Fprop => "fprop",
        GemmRole::Dgrad => "dgrad",
        GemmRole::Wgrad => "wgrad",
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Input => "input",
        Role::Weight => "weight",
        Role::Grad => "gradient",
    }
}

/// `E4M3 in blocks of 1x128`.
fn spec_name(spec: QuantSpec) -> String {
    match block::block(spec.scaling) {
        Some([rows, columns]) => format!("{:?} in blocks of {rows}x{columns}", spec.format),
        None => format!("{:?} with one scale", spec.format),
    }
}

/// Which of a linear layer's GEMMs a node is, if it is one.
fn role(
    graph: &Graph,
    node: Node,
    param: &SecondaryMap<Value, Option<usize>>,
    linear: &SecondaryMap<Value, bool>,
) -> Option<GemmRole> {
    let data = &graph.nodes[node];
    let Op::Matmul(op) = &data.op else { return None };
    let weight = |it: Value| param[it].is_some();
    let is =
        |transpose_a, transpose_b| *op == Matmul { transpose_a, transpose_b, ..Matmul::default() };
    let like = graph.values[data.results[0]].like;
    match data.section {
        Section::Forward if is(false, true) && weight(data.inputs[1]) => Some(GemmRole::Fprop),
        Section::Backward if is(false, false) && linear[data.inputs[1]] => Some(GemmRole::Dgrad),
        Section::Backward if is(true, false) && like.is_some_and(|it| linear[it]) => {
            Some(GemmRole::Wgrad)
        }
        _ => None,
    }
}

/// A copy of a quantized tensor, as a GEMM reads it.
#[derive(Debug, Clone)]
struct Copy {
    codes: Value,
    scale_inv: Value,
    granule: Granule,
}

/// The copies of a quantized tensor, made when they are needed.
#[derive(Debug, Clone, Default)]
struct Codes {
    rows: Option<Copy>,
    columns: Option<Copy>,
}

struct Walk<'a> {
    builder: Builder<'a>,
    gemms: Gemms,
    codes: FxHashMap<(Value, QuantSpec), Codes>,
    /// What codes stand for, by how they are made and when.
    rounded: FxHashMap<(Value, QuantSpec, Along, Section), Value>,
    /// Of stochastic rounding, once it is needed.
    seed: Option<Value>,
    /// To be updated at the end of the section.
    histories: Vec<History>,
    weights: Vec<Weight>,
    blocks: Vec<BlockWeight>,
}

impl Walk<'_> {
    fn run(&mut self, order: &[Node]) -> Result<(), BuildError> {
        let casts = self.store_codes();
        let mut section = Section::Prepare;
        for &node in order {
            let data = &self.builder.graph.nodes[node];
            if casts.contains(&data.results[0]) {
                continue;
            }
            let (now, scope) = (data.section, data.scope);
            while section < now {
                self.close(section)?;
                section = following(section);
            }
            (self.builder.section, self.builder.scope) = (now, scope);
            if let Some(gemm) = self.gemms.of[node] {
                self.gemm(node, gemm)?;
            }
            self.builder.graph.order.push(node);
            self.gather_scales(node)?;
        }
        self.close(section)
    }

    /// What is made at the end of a section, where collectives of one kind go together.
    fn close(&mut self, section: Section) -> Result<(), BuildError> {
        self.builder.section = section;
        match section {
            Section::Prepare | Section::Update => {
                self.quantize_weights(section)?;
                self.quantize_block_weights(section)
            }
            Section::Forward | Section::Backward => self.update_histories(),
        }
    }

    /// Replaces a GEMM by one on codes.
    fn gemm(&mut self, node: Node, gemm: Gemm) -> Result<(), BuildError> {
        let data = self.builder.graph.nodes[node].clone();
        if gemm.specs.iter().all(|it| emulate::is_emulated(it.scaling)) {
            for operand in 0..2 {
                let (spec, columns) = (gemm.specs[operand], gemm.columns(operand));
                let value = self.rounded(data.inputs[operand], spec, columns)?;
                self.builder.graph.nodes[node].inputs[operand] = value;
            }
            return Ok(());
        }
        let [a, b] = [0, 1].map(|it| self.copy(data.inputs[it], gemm.specs[it], gemm.columns(it)));
        let (a, b) = (a?, b?);
        let fast = self.builder.graph.scopes[data.scope].recipe.fast_accumulation(gemm.role);
        let op = QuantMatmul {
            out: self.builder.graph.ty(data.results[0]).dtype,
            accumulate: false,
            bias: false,
            fast,
            a: a.granule,
            b: b.granule,
        };
        let node = &mut self.builder.graph.nodes[node];
        node.op = op.into();
        node.inputs = [a.codes, b.codes, a.scale_inv, b.scale_inv].into_iter().collect();
        Ok(())
    }

    /// Rows or columns of the codes of `value`.
    fn copy(&mut self, value: Value, spec: QuantSpec, columns: bool) -> Result<Copy, BuildError> {
        let key = (value, spec);
        let known = self.codes.get(&key).cloned().unwrap_or_default();
        if let Some(copy) = if columns { &known.columns } else { &known.rows } {
            return Ok(copy.clone());
        }
        let stored = self.gemms.param[value].is_some_and(|it| self.gemms.weights[it].is_some());
        let codes = match known.rows {
            // A weight is gathered by rows.
            Some(rows) if stored || spec.scaling.is_per_tensor() => {
                Codes { columns: Some(self.transposed(value, &rows)?), rows: Some(rows) }
            }
            rows if !spec.scaling.is_per_tensor() => {
                let made = self.blocks(value, spec, columns)?;
                Codes { rows: made.rows.or(rows), columns: made.columns.or(known.columns) }
            }
            _ => self.quantize(value, spec)?,
        };
        self.codes.insert(key, codes.clone());
        let copy = if columns { codes.columns } else { codes.rows };
        Ok(copy.expect("it was made"))
    }

    /// Codes of an activation or a gradient, where it is.
    fn quantize(&mut self, value: Value, spec: QuantSpec) -> Result<Codes, BuildError> {
        let name = self.name(value);
        let [scale, scale_inv] = match spec.scaling {
            Scaling::Current { .. } => self.current_scale(&name, value, spec)?,
            Scaling::Delayed { .. } => self.delayed_scale(&name, value, spec)?,
            _ => unreachable!("other scalings are no scale of a tensor"),
        };
        let op = quantize(spec);
        let codes = self.builder.op(&format!("{name}.codes"), op, &[value, scale])?;
        let rows = Copy { codes, scale_inv, granule: Granule::default() };
        let columns = match self.gemms.copies.get(&(value, spec)) {
            Some([_, true]) => Some(self.transposed(value, &rows)?),
            _ => None,
        };
        Ok(Codes { rows: Some(rows), columns })
    }

    /// Columns of codes that have the scales of the rows: one number, or those of squares.
    fn transposed(&mut self, value: Value, rows: &Copy) -> Result<Copy, BuildError> {
        let ndim = self.builder.graph.ty(rows.codes).ndim();
        let perm: Vec<usize> = std::iter::once(ndim - 1).chain(0..ndim - 1).collect();
        let name = self.name(value);
        let op = Transpose { perm };
        let codes = self.builder.op(&format!("{name}.codes_t"), op.clone(), &[rows.codes])?;
        let scale_inv = match rows.granule {
            Granule::Tensor(_) => rows.scale_inv,
            Granule::Row | Granule::Block => {
                self.builder.op(&format!("{name}.scale_inv_t"), op, &[rows.scale_inv])?
            }
        };
        Ok(Copy { codes, scale_inv, granule: rows.granule.clone() })
    }

    fn name(&self, value: Value) -> String {
        self.builder.graph.values[value].name.clone()
    }
}

fn following(section: Section) -> Section {
    match section {
        Section::Prepare => Section::Forward,
        Section::Forward => Section::Backward,
        Section::Backward | Section::Update => Section::Update,
    }
}

/// The op that makes rows.
fn quantize(spec: QuantSpec) -> ops::Quantize {
    ops::Quantize::new(fp8(spec.format), Copies::Rows)
}

/// The element type of codes of a format, which is one of FP8.
fn fp8(format: Format) -> DType {
    let of = |it: &&DType| it.fp8() == Some(format);
    *DType::ALL.iter().find(of).expect("only FP8 codes are multiplied")
}
