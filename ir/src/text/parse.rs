//! Parsing: one statement a line, straight into the program.
//!
//! This file has what graphs and plans share; [`graph`] and [`plan`] have one function per statement.
//! Whatever the input, the answer is a program or a [`ParseError`]: sizes are checked here so that
//! nothing later can overflow on them.

mod body;
mod graph;
mod plan;

use std::borrow::Cow;
use std::ops::Range;

use rustc_hash::FxHashMap;
use serde::de::DeserializeOwned;

use super::lex::Cursor;
use super::{PHASES, ParseError, Program};
use crate::graph::{Init, Name};
use crate::ops::{Body, CollectiveKind, Fused, Op};
use crate::placement::{AxisSet, Mesh, MeshAxis, ReduceOp, Sharding};
use crate::{DType, Phase, Shape, TensorType};

/// The state of parsing one file.
pub(super) struct Parser<'a> {
    cursor: Cursor<'a>,
    /// Ops by their text: layers repeat, and RON is slow.
    ops: FxHashMap<&'a str, Op>,
    /// Shardings by their text.
    shardings: FxHashMap<&'a str, Sharding>,
    /// Bodies by their name, with its `@`.
    bodies: FxHashMap<&'a str, Body>,
}

/// The first line of a program.
struct Header {
    name: Name,
    mesh: Mesh,
    weight_mesh: Option<AxisSet>,
    phase: Phase,
    micro_batches: u32,
    persistent_bytes: u64,
    step_bytes: u64,
    events: u32,
    /// The bytes of the whole header.
    span: Range<usize>,
}

/// A name and where it stands.
#[derive(Debug, Clone)]
struct Spanned<'a> {
    name: Cow<'a, str>,
    span: Range<usize>,
}

/// What comes after `=`.
enum Call {
    Op(Op),
    Copy,
    /// A collective, with axes in a graph.
    Collective(CollectiveKind, AxisSet),
}

impl<'a> Parser<'a> {
    pub fn new(text: &'a str) -> Parser<'a> {
        let (ops, shardings, bodies) = Default::default();
        Parser { cursor: Cursor::new(text), ops, shardings, bodies }
    }

    /// The whole file.
    pub fn program(mut self) -> Result<Program, ParseError> {
        self.cursor.skip_lines();
        let res = if self.cursor.eat_word("graph") {
            Program::Graph(self.graph()?)
        } else if self.cursor.eat_word("plan") {
            Program::Plan(self.plan()?)
        } else {
            return Err(self.cursor.expected("`graph` or `plan`"));
        };
        self.cursor.skip_lines();
        match self.cursor.byte() {
            None => Ok(res),
            Some(_) => Err(self.cursor.expected("nothing after the closing `}`")),
        }
    }

    /// A body and nothing else.
    pub fn only_body(mut self) -> Result<Body, ParseError> {
        let res = self.body()?;
        match self.cursor.byte() {
            None => Ok(res),
            Some(_) => Err(self.cursor.expected("nothing after the closing `}`")),
        }
    }

    /// `@name phase=.. mesh=(..) .. {`
    fn header(&mut self, phases: Range<usize>) -> Result<Header, ParseError> {
        let start = self.cursor.skip();
        let name = self.cursor.sigil(b'@', "the name of the program")?.into_owned();
        let mut phase = None;
        let mut mesh: Option<Mesh> = None;
        let mut weight_mesh = None;
        let (mut micro_batches, mut persistent_bytes, mut step_bytes, mut events) = (1, 0, 0, 0);
        let of_graph = phases.start == 0;
        while !self.cursor.eat(b'{') {
            let start = self.cursor.skip();
            let key = self.cursor.word("`{` or a property such as `phase=`")?;
            let span = start..self.cursor.pos();
            self.cursor.expect(b'=')?;
            match key {
                "phase" => phase = Some(self.phase(phases.clone())?),
                "mesh" => mesh = Some(self.mesh()?),
                "weight_mesh" if of_graph => match &mesh {
                    Some(mesh) => weight_mesh = Some(self.axes(mesh)?),
                    None => {
                        let message = "`mesh` must come before `weight_mesh`".to_string();
                        return Err(self.cursor.error(span, message));
                    }
                },
                "micro_batches" => micro_batches = self.cursor.number("a number")?,
                "persistent_bytes" if !of_graph => {
                    persistent_bytes = self.cursor.number("a number of bytes")?;
                }
                "step_bytes" if !of_graph => {
                    step_bytes = self.cursor.number("a number of bytes")?;
                }
                "events" if !of_graph => events = self.cursor.number("a number of events")?,
                _ => return Err(self.cursor.error(span, format!("unknown property `{key}`"))),
            }
        }
        let at = self.cursor.pos();
        let missing = |what: &str| {
            self.cursor.error(at - 1..at, format!("`{what}=` is missing before the `{{`"))
        };
        let mesh = mesh.ok_or_else(|| missing("mesh"))?;
        let phase = phase.ok_or_else(|| missing("phase"))?;
        Ok(Header {
            name,
            mesh,
            weight_mesh,
            phase,
            micro_batches,
            persistent_bytes,
            step_bytes,
            events,
            span: start..at - 1,
        })
    }

    fn phase(&mut self, allowed: Range<usize>) -> Result<Phase, ParseError> {
        let allowed = &PHASES[allowed];
        let names = || allowed.iter().map(|it| it.1).collect::<Vec<_>>().join(", ");
        let word = self.cursor.peek_word();
        let Some(&(phase, _)) = allowed.iter().find(|it| it.1 == word) else {
            return Err(self.cursor.expected(&format!("one of the phases {}", names())));
        };
        self.cursor.word("a phase")?;
        Ok(phase)
    }

    /// `(dp=2, tp_kv=2 of tp, tp_rep=2 of tp)`
    fn mesh(&mut self) -> Result<Mesh, ParseError> {
        let start = self.cursor.skip();
        self.cursor.expect(b'(')?;
        let mut axes = Vec::new();
        while !self.cursor.eat(b')') {
            self.comma(axes.len())?;
            let name = self.cursor.word("the name of a mesh axis")?.to_string();
            self.cursor.expect(b'=')?;
            let size = self.cursor.number("the size of the axis")?;
            let part_of = match self.cursor.eat_word("of") {
                true => Some(self.cursor.word("the name of the whole axis")?.to_string()),
                false => None,
            };
            axes.push(MeshAxis { name, size, part_of });
        }
        let mesh = Mesh { axes };
        let span = start..self.cursor.pos();
        mesh.validate().map_err(|it| self.cursor.error(span, it.to_string()))?;
        Ok(mesh)
    }

    /// `(dp, tp)`
    fn axes(&mut self, mesh: &Mesh) -> Result<AxisSet, ParseError> {
        self.cursor.expect(b'(')?;
        self.axes_until_close(mesh, 0)
    }

    /// `dp, tp)`, of a list that has `before` other entries in front.
    fn axes_until_close(&mut self, mesh: &Mesh, before: usize) -> Result<AxisSet, ParseError> {
        let mut res = AxisSet::EMPTY;
        let mut n = before;
        while !self.cursor.eat(b')') {
            self.comma(n)?;
            n += 1;
            let start = self.cursor.skip();
            let name = self.cursor.word("`)` or the name of a mesh axis")?;
            let axes = mesh
                .axis_set(&[name])
                .map_err(|it| self.cursor.error(start..self.cursor.pos(), it.to_string()))?;
            res = res.union(axes);
        }
        Ok(res)
    }

    /// The comma in front of every entry but the first.
    fn comma(&mut self, n: usize) -> Result<(), ParseError> {
        if n == 0 || self.cursor.eat(b',') {
            return Ok(());
        }
        Err(self.cursor.expected("`,` or the end of the list"))
    }

    /// `bf16[4096, 1024]`
    fn ty(&mut self) -> Result<TensorType, ParseError> {
        let start = self.cursor.skip();
        let dtype = self.dtype()?;
        self.cursor.expect(b'[')?;
        let mut shape = Shape::new();
        while !self.cursor.eat(b']') {
            self.comma(shape.len())?;
            shape.push(self.cursor.number("the size of a dimension, or `]`")?);
        }
        let ty = TensorType { dtype, shape };
        if let Some(limit) = ty.exceeds() {
            let message = format!("the tensor has more than {limit}");
            return Err(self.cursor.error(start..self.cursor.pos(), message));
        }
        Ok(ty)
    }

    fn dtype(&mut self) -> Result<DType, ParseError> {
        let start = self.cursor.skip();
        let word = self.cursor.word("a type such as `f32[2, 3]`")?;
        word.parse().map_err(|it| self.cursor.error(start..self.cursor.pos(), it))
    }

    /// `[tp.dp, _] sum(cp)`, for a tensor of this type.
    fn sharding(&mut self, mesh: &Mesh, ty: &TensorType) -> Result<Sharding, ParseError> {
        let start = self.cursor.skip();
        if self.cursor.byte() != Some(b'[') {
            return Err(self.cursor.expected("a sharding such as `[dp, _]`"));
        }
        self.cursor.bracketed()?;
        if ReduceOp::ALL.iter().any(|it| it.name() == self.cursor.peek_word()) {
            self.cursor.word("a reduction")?;
            if self.cursor.byte() != Some(b'(') {
                return Err(self.cursor.expected("`(` and axes"));
            }
            self.cursor.bracketed()?;
        }
        let text = self.cursor.since(start);
        let fail = |it: crate::placement::PlacementError| {
            self.cursor.error(start..start + text.len(), it.to_string())
        };
        let sharding = match self.shardings.get(text) {
            Some(sharding) => sharding.clone(),
            None => {
                let sharding = Sharding::parse(text, mesh).map_err(fail)?;
                self.shardings.insert(text, sharding.clone());
                sharding
            }
        };
        if sharding.ndim() != ty.ndim() {
            sharding.validate(&ty.shape, mesh).map_err(fail)?;
        }
        Ok(sharding)
    }

    /// `matmul(transpose_b:true)`, `reduce_scatter(sum, tp)` in a graph, `reduce_scatter(sum)` and
    /// `copy` in a plan.
    fn call(&mut self, mesh: Option<&Mesh>) -> Result<Call, ParseError> {
        let start = self.cursor.skip();
        let word = self.cursor.peek_word();
        if mesh.is_none() && word == "copy" {
            self.cursor.word("`copy`")?;
            return Ok(Call::Copy);
        }
        let collectives = CollectiveKind::ALL;
        if let Some(&kind) = collectives.iter().find(|it| it.name() == word) {
            return self.collective(kind, mesh);
        }
        if self.cursor.byte() == Some(b'@') {
            let name = self.cursor.body_name()?;
            let unknown = || {
                let message = format!("unknown body `{name}`: it is declared before it is used");
                self.cursor.error(start..start + name.len(), message)
            };
            let body = self.bodies.get(name).ok_or_else(unknown)?.clone();
            return Ok(Call::Op(Fused { body }.into()));
        }
        self.op().map(Call::Op)
    }

    /// `matmul(transpose_b:true)`, which is no collective.
    fn op(&mut self) -> Result<Op, ParseError> {
        let start = self.cursor.skip();
        let text = self.cursor.ron_text("an op")?;
        if let Some(op) = self.ops.get(text) {
            return Ok(op.clone());
        }
        let fail = |message| Err(self.cursor.error(start..start + text.len(), message));
        match Op::from_text(text) {
            Ok(Op::Collective(_)) => {
                fail("a collective goes by its kind, such as `all_gather(dp)`".to_string())
            }
            Ok(op) => {
                self.ops.insert(text, op.clone());
                Ok(op)
            }
            Err(message) => fail(message),
        }
    }

    fn collective(
        &mut self,
        kind: CollectiveKind,
        mesh: Option<&Mesh>,
    ) -> Result<Call, ParseError> {
        self.cursor.word("a collective")?;
        if mesh.is_none() && kind.reduce().is_none() {
            return Ok(Call::Collective(kind, AxisSet::EMPTY));
        }
        self.cursor.expect(b'(')?;
        let kind = match kind.reduce() {
            Some(_) => kind.with_reduce(self.reduce_op()?),
            None => kind,
        };
        match mesh {
            Some(mesh) => {
                let before = usize::from(kind.reduce().is_some());
                Ok(Call::Collective(kind, self.axes_until_close(mesh, before)?))
            }
            None => {
                self.cursor.expect(b')')?;
                Ok(Call::Collective(kind, AxisSet::EMPTY))
            }
        }
    }

    fn reduce_op(&mut self) -> Result<ReduceOp, ParseError> {
        let word = self.cursor.peek_word();
        let Some(op) = ReduceOp::ALL.into_iter().find(|it| it.name() == word) else {
            return Err(self.cursor.expected("sum, avg, max or min"));
        };
        self.cursor.word("a reduction")?;
        Ok(op)
    }

    /// RON on the rest of a word: `(optimizer:..)`, `Full`, `Normal(std:0.02)`.
    fn ron<T: DeserializeOwned>(&mut self, what: &str) -> Result<T, ParseError> {
        let start = self.cursor.skip();
        let text = self.cursor.ron_text(what)?;
        super::ron_options().from_str(text).map_err(|it| {
            let message = format!("`{text}` is not {what}: {}", it.code);
            self.cursor.error(start..start + text.len(), message)
        })
    }

    /// `init=..`, after the `=`: variants with fields, or none.
    fn init(&mut self) -> Result<Init, ParseError> {
        self.ron("an init such as `Normal(std:0.02)`")
    }

    /// `(%a, %b)`
    fn aliases(&mut self) -> Result<Vec<Name>, ParseError> {
        let mut res = Vec::new();
        self.cursor.expect(b'(')?;
        while !self.cursor.eat(b')') {
            self.comma(res.len())?;
            res.push(self.value_name()?.name.into_owned());
        }
        Ok(res)
    }

    /// `%name`
    fn value_name(&mut self) -> Result<Spanned<'a>, ParseError> {
        let start = self.cursor.skip();
        let name = self.cursor.sigil(b'%', "a value")?;
        Ok(Spanned { name, span: start..self.cursor.pos() })
    }

    /// Reads `%a, %b` into `into`; says how many.
    fn value_names(&mut self, into: &mut Vec<Spanned<'a>>) -> Result<usize, ParseError> {
        let before = into.len();
        loop {
            into.push(self.value_name()?);
            if !self.cursor.eat(b',') {
                return Ok(into.len() - before);
            }
        }
    }

    /// The name of a result: `result loss`.
    fn result_name<T>(&mut self, results: &[(Name, T)]) -> Result<Name, ParseError> {
        let start = self.cursor.skip();
        let name = self.cursor.name("the name of a result")?.into_owned();
        if results.iter().any(|it| it.0 == name) {
            let message = format!("there is a result `{name}` already");
            return Err(self.cursor.error(start..self.cursor.pos(), message));
        }
        Ok(name)
    }

    /// The next statement: `None` at the closing brace, else where it starts.
    fn statement(&mut self, what: &str) -> Result<Option<usize>, ParseError> {
        let start = self.cursor.skip_lines();
        match self.cursor.byte() {
            None => Err(self.cursor.expected(&format!("{what} or `}}`"))),
            Some(b'}') => {
                self.cursor.expect(b'}')?;
                Ok(None)
            }
            Some(_) => Ok(Some(start)),
        }
    }

    fn repeated(&self, what: &str, span: Range<usize>) -> ParseError {
        self.cursor.error(span, format!("`{what}` is here twice"))
    }
}
