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
//! A weight is quantized from its master, in its storage layout, in `Prepare` and behind the optimizer, so its
//! codes are a state and what FSDP gathers. One that something else than quantized GEMMs reads (a tied
//! embedding) is quantized where it is gathered.

mod tensor;
mod weight;

use cranelift_entity::SecondaryMap;
use ir::ops::{self, Copies, Granule, Matmul, QuantMatmul, Transpose};
use ir::quant::{Format, GemmRole, QuantSpec, Role, Scaling};
use ir::{BuildError, Builder, DType, Graph, Node, Op, Phase, Section, Value};
use rustc_hash::FxHashMap;

use crate::{Pass, PassError};
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
        let gemms = Gemms::find(graph);
        if gemms.of.values().all(Option::is_none) {
            return Ok(());
        }
        let order = std::mem::take(&mut graph.order);
        let (builder, codes) = (Builder::new(graph), FxHashMap::default());
        let (histories, weights) = (Vec::new(), Vec::new());
        let mut walk = Walk { builder, gemms, codes, histories, weights };
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

struct Gemms {
    of: SecondaryMap<Node, Option<Gemm>>,
    /// How the weight of a parameter is stored, by index; `None` for one that is not codes.
    weights: Vec<Option<QuantSpec>>,
    /// Of each tensor and way to quantize it: whether rows and columns are read.
    copies: FxHashMap<(Value, QuantSpec), [bool; 2]>,
}

impl Gemms {
    fn find(graph: &Graph) -> Gemms {
        let mut param = SecondaryMap::<Value, Option<usize>>::new();
        for (index, it) in graph.params.iter().enumerate() {
            param[it.full] = Some(index);
        }
        let mut res = Gemms {
            of: SecondaryMap::new(),
            weights: vec![None; graph.params.len()],
            copies: FxHashMap::default(),
        };
        let mut readers: Vec<Vec<Option<QuantSpec>>> = vec![Vec::new(); graph.params.len()];
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let gemm = role(graph, node, &param).and_then(|it| gemm(graph, node, it));
            res.of[node] = gemm;
            for (operand, &input) in data.inputs.iter().enumerate() {
                if let Some(index) = param[input] {
                    readers[index].push(gemm.map(|it| it.specs[operand]));
                }
            }
            let Some(gemm) = gemm else { continue };
            for (operand, (&input, spec)) in data.inputs.iter().zip(gemm.specs).enumerate() {
                let columns = match gemm.role {
                    GemmRole::Fprop => false,
                    GemmRole::Dgrad => operand == 1,
                    GemmRole::Wgrad => true,
                };
                res.copies.entry((input, spec)).or_default()[usize::from(columns)] = true;
            }
        }
        for (index, readers) in readers.iter().enumerate() {
            let first = readers.first().copied().flatten();
            let same = readers.iter().all(|it| *it == first);
            res.weights[index] = first.filter(|_| same && graph.params[index].aliases.is_empty());
        }
        res
    }
}

/// Which of a linear layer's GEMMs a node is, if it is one.
fn role(graph: &Graph, node: Node, param: &SecondaryMap<Value, Option<usize>>) -> Option<GemmRole> {
    let data = &graph.nodes[node];
    let Op::Matmul(op) = &data.op else { return None };
    let weight = |it: Value| param[it].is_some();
    let is =
        |transpose_a, transpose_b| *op == Matmul { transpose_a, transpose_b, ..Matmul::default() };
    let like = graph.values[data.results[0]].like;
    match data.section {
        Section::Forward if is(false, true) && weight(data.inputs[1]) => Some(GemmRole::Fprop),
        Section::Backward if is(false, false) && weight(data.inputs[1]) => Some(GemmRole::Dgrad),
        Section::Backward if is(true, false) && like.is_some_and(weight) => Some(GemmRole::Wgrad),
        _ => None,
    }
}

/// The GEMM as its module's recipe wants it; `None` if one of its operands stays as it is.
fn gemm(graph: &Graph, node: Node, role: GemmRole) -> Option<Gemm> {
    let data = &graph.nodes[node];
    let recipe = &graph.scopes[data.scope].recipe;
    let operands = match role {
        GemmRole::Fprop => [Role::Input, Role::Weight],
        GemmRole::Dgrad => [Role::Grad, Role::Weight],
        GemmRole::Wgrad => [Role::Grad, Role::Input],
    };
    let [Some(a), Some(b)] = operands.map(|it| recipe.spec(it)) else { return None };
    Some(Gemm { role, specs: [a, b] })
}

/// A copy of a quantized tensor, as a GEMM reads it.
#[derive(Debug, Clone)]
struct Copy {
    codes: Value,
    scale_inv: Value,
    granule: Granule,
}

/// The copies of a quantized tensor, made when they are needed.
#[derive(Debug, Clone)]
struct Codes {
    rows: Copy,
    columns: Option<Copy>,
}

struct Walk<'a> {
    builder: Builder<'a>,
    gemms: Gemms,
    codes: FxHashMap<(Value, QuantSpec), Codes>,
    /// To be updated at the end of the section.
    histories: Vec<History>,
    weights: Vec<Weight>,
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
        }
        self.close(section)
    }

    /// What is made at the end of a section, where collectives of one kind go together.
    fn close(&mut self, section: Section) -> Result<(), BuildError> {
        self.builder.section = section;
        match section {
            Section::Prepare | Section::Update => self.quantize_weights(section),
            Section::Forward | Section::Backward => self.update_histories(),
        }
    }

    /// Replaces a GEMM by one on codes.
    fn gemm(&mut self, node: Node, gemm: Gemm) -> Result<(), BuildError> {
        let data = self.builder.graph.nodes[node].clone();
        let columns = match gemm.role {
            GemmRole::Fprop => [false, false],
            GemmRole::Dgrad => [false, true],
            GemmRole::Wgrad => [true, true],
        };
        let [a, b] = [0, 1].map(|it| self.copy(data.inputs[it], gemm.specs[it], columns[it]));
        let (a, b) = (a?, b?);
        let fast = self.builder.graph.scopes[data.scope].recipe.fast_accumulation(gemm.role);
        let op = QuantMatmul {
            out: self.builder.graph.ty(data.results[0]).dtype,
            accumulate: false,
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
        if !self.codes.contains_key(&key) {
            let codes = self.quantize(value, spec)?;
            self.codes.insert(key, codes);
        }
        let codes = self.codes[&key].clone();
        match (columns, codes.columns) {
            (false, _) => Ok(codes.rows),
            (true, Some(columns)) => Ok(columns),
            // A weight is gathered by rows.
            (true, None) => {
                let columns = self.transposed(value, &codes.rows)?;
                let codes = Codes { columns: Some(columns.clone()), ..codes };
                self.codes.insert(key, codes);
                Ok(columns)
            }
        }
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
        Ok(Codes { rows, columns })
    }

    /// Columns of codes whose scale is one number.
    fn transposed(&mut self, value: Value, rows: &Copy) -> Result<Copy, BuildError> {
        let ndim = self.builder.graph.ty(rows.codes).ndim();
        let perm = std::iter::once(ndim - 1).chain(0..ndim - 1).collect();
        let name = format!("{}.codes_t", self.name(value));
        let codes = self.builder.op(&name, Transpose { perm }, &[rows.codes])?;
        Ok(Copy { codes, ..rows.clone() })
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
    ops::Quantize { to: fp8(spec.format), copies: Copies::Rows, pieces: Vec::new() }
}

/// The element type of codes of a format.
fn fp8(format: Format) -> DType {
    match format {
        Format::E5M2 => DType::E5M2,
        Format::E4M3 | Format::E2M1 | Format::E8M0 => DType::E4M3,
    }
}
