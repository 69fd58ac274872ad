//! Statements of a graph. Names are resolved at the end: a parameter names its gradient, and a graph
//! that uses a value too early is for the verifier to refuse.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::ops::Range;

use cranelift_entity::{EntityRef, PrimaryMap};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{Call, Parser, Spanned};
use crate::graph::{AfterForward, Def, Init, NodeData, Param, Scope, ScopeData, Store, ValueData};
use crate::ops::Collective;
use crate::text::{ParseError, SECTIONS};
use crate::{Graph, Op, Section, TensorType, Value};

/// A graph with names that are still to be resolved.
struct Draft<'a> {
    graph: Graph,
    names: FxHashMap<Cow<'a, str>, Value>,
    section: Option<Section>,
    /// Operands of all nodes, in order.
    inputs: Vec<Spanned<'a>>,
    likes: Vec<(Value, Spanned<'a>)>,
    params: Vec<ParamLinks<'a>>,
    stores: Vec<(Spanned<'a>, Spanned<'a>)>,
    results: Vec<Spanned<'a>>,
    parents: Vec<(Scope, usize, Range<usize>)>,
    /// Uses of scopes.
    scopes: Vec<(usize, Range<usize>)>,
    has_root: bool,
    has_training: bool,
    has_run: bool,
}

/// Values that a parameter names.
#[derive(Default)]
struct ParamLinks<'a> {
    compute: Option<Spanned<'a>>,
    full: Option<Spanned<'a>>,
    grad: Option<Spanned<'a>>,
}

/// What a value's declaration says besides its name.
struct Typed<'a> {
    ty: TensorType,
    sharding: Option<crate::placement::Sharding>,
    pinned: bool,
    like: Option<Spanned<'a>>,
}

impl<'a> Parser<'a> {
    pub(super) fn graph(&mut self) -> Result<Graph, ParseError> {
        let header = self.header(0..4)?;
        let mut graph = Graph::new(&header.name, header.mesh);
        graph.weight_mesh = header.weight_mesh;
        graph.phase = header.phase;
        graph.micro_batches = header.micro_batches;
        let mut draft = Draft {
            graph,
            names: FxHashMap::default(),
            section: None,
            inputs: Vec::new(),
            likes: Vec::new(),
            params: Vec::new(),
            stores: Vec::new(),
            results: Vec::new(),
            parents: Vec::new(),
            scopes: Vec::new(),
            has_root: false,
            has_training: false,
            has_run: false,
        };
        while let Some(start) = self.statement("a statement")? {
            match self.cursor.byte() {
                Some(b'%') => self.node(&mut draft)?,
                _ => self.graph_statement(&mut draft, start)?,
            }
            self.cursor.end_of_line()?;
        }
        self.resolve(draft)
    }

    fn graph_statement(&mut self, draft: &mut Draft<'a>, start: usize) -> Result<(), ParseError> {
        let word = self.cursor.peek_word();
        if let Some(&(section, _)) = SECTIONS.iter().find(|it| it.1 == word) {
            self.cursor.word("a section")?;
            draft.section = Some(section);
            return self.cursor.expect(b':');
        }
        let span = start..start + word.len();
        match word {
            "training" | "run" => {
                self.cursor.word("a statement")?;
                let seen = if word == "run" { &mut draft.has_run } else { &mut draft.has_training };
                if std::mem::replace(seen, true) {
                    return Err(self.repeated(word, span));
                }
                match word {
                    "run" => draft.graph.run = self.ron("data and schedule")?,
                    _ => draft.graph.training = self.ron("how to train")?,
                }
                Ok(())
            }
            "body" => self.body_statement(),
            "scope" => self.scope(draft),
            "input" => self.leaf(draft, Def::Input),
            "state" => self.leaf(draft, Def::State),
            "sum" => self.leaf(draft, Def::Sum),
            "param" => self.param(draft),
            "store" => self.store(draft),
            "result" => {
                self.cursor.word("`result`")?;
                let name = self.result_name(&draft.graph.results)?;
                self.cursor.expect(b'=')?;
                draft.results.push(self.value_name()?);
                // The value is known once all names are.
                draft.graph.results.push((name, Value::from_u32(0)));
                Ok(())
            }
            _ => Err(self.cursor.expected(
                "a statement (`%value = op ..`, input, param, state, sum, scope, body, training, run, store, \
                 result or a section)",
            )),
        }
    }

    /// `scope 1 "model.layers.0" parent=0 unit=1 layer=0 checkpoint=Full reshard`
    fn scope(&mut self, draft: &mut Draft<'a>) -> Result<(), ParseError> {
        self.cursor.word("`scope`")?;
        let start = self.cursor.skip();
        let number: usize = self.cursor.number("the number of a scope")?;
        let next = draft.graph.scopes.len();
        let is_root = number == 0 && !std::mem::replace(&mut draft.has_root, number == 0);
        if number != next && !is_root {
            let message = format!("the next scope must be number {next}");
            return Err(self.cursor.error(start..self.cursor.pos(), message));
        }
        let root = (!is_root).then(|| Scope::new(0));
        let path = self.cursor.string("the path of the scope in quotes")?.into_owned();
        let mut data = ScopeData { path, parent: root, ..ScopeData::default() };
        let scope = Scope::new(number);
        loop {
            if self.cursor.eat_word("reshard") {
                data.after_forward = match self.cursor.eat(b'=') {
                    true => AfterForward::KeepPiece(self.axes(&draft.graph.mesh)?),
                    false => AfterForward::Drop,
                };
            } else if self.cursor.eat_word("parent") {
                self.cursor.expect(b'=')?;
                let start = self.cursor.skip();
                if self.cursor.eat_word("none") {
                    data.parent = None;
                    continue;
                }
                let parent = self.cursor.number("the number of a scope, or `none`")?;
                draft.parents.push((scope, parent, start..self.cursor.pos()));
            } else if self.cursor.eat_word("unit") {
                self.cursor.expect(b'=')?;
                data.unit = self.cursor.number("the number of an FSDP unit")?;
            } else if self.cursor.eat_word("layer") {
                self.cursor.expect(b'=')?;
                data.layer = Some(self.cursor.number("the number of a layer")?);
            } else if self.cursor.eat_word("checkpoint") {
                self.cursor.expect(b'=')?;
                data.checkpoint = self.ron("None, Full, Selective([..]) or Recompute([..])")?;
            } else if self.cursor.eat_word("weight_mesh") {
                self.cursor.expect(b'=')?;
                data.weight_mesh = Some(self.axes(&draft.graph.mesh)?);
            } else if self.cursor.eat_word("recipe") {
                self.cursor.expect(b'=')?;
                let start = self.cursor.skip();
                data.recipe = self.ron("a recipe such as `Float8CurrentScaling()`")?;
                let span = start..self.cursor.pos();
                data.recipe.check().map_err(|it| self.cursor.error(span, it.to_string()))?;
            } else {
                break;
            }
        }
        match is_root {
            true => draft.graph.scopes[scope] = data,
            false => {
                draft.graph.scopes.push(data);
            }
        }
        Ok(())
    }

    /// `input %tokens : i32[8, 32] @ [dp, _] pinned`
    fn leaf(&mut self, draft: &mut Draft<'a>, def: Def) -> Result<(), ParseError> {
        self.cursor.word("a statement")?;
        let name = self.value_name()?;
        self.declare(draft, name, def)?;
        Ok(())
    }

    /// `param %w : f32[64, 64] @ [tp.dp, _] pinned init=Ones decay grad=%w.grad in 3`
    fn param(&mut self, draft: &mut Draft<'a>) -> Result<(), ParseError> {
        self.cursor.word("`param`")?;
        let name = self.value_name()?;
        let value = self.declare(draft, name, Def::Param)?;
        if self.cursor.eat_word("unlisted") {
            return Ok(());
        }
        let mut param = Param {
            value,
            compute: value,
            full: value,
            label: None,
            init: Init::Zeros,
            decay: false,
            trainable: true,
            placed: false,
            reduce_dtype: draft.graph.ty(value).dtype,
            scope: Scope::new(0),
            aliases: Vec::new(),
            grad: None,
        };
        let mut links = ParamLinks::default();
        loop {
            let word = self.cursor.peek_word();
            match word {
                "decay" | "frozen" | "placed" => {
                    self.cursor.word("a flag")?;
                    param.decay |= word == "decay";
                    param.trainable &= word != "frozen";
                    param.placed |= word == "placed";
                }
                "init" | "label" | "reduce" | "aliases" | "compute" | "full" | "grad" => {
                    self.cursor.word("a property")?;
                    self.cursor.expect(b'=')?;
                    match word {
                        "init" => param.init = self.init()?,
                        "label" => {
                            let ty = draft.graph.ty(value);
                            param.label = Some(self.sharding(&draft.graph.mesh, ty)?);
                        }
                        "reduce" => param.reduce_dtype = self.dtype()?,
                        "aliases" => param.aliases = self.aliases()?,
                        "compute" => links.compute = Some(self.value_name()?),
                        "full" => links.full = Some(self.value_name()?),
                        _ => links.grad = Some(self.value_name()?),
                    }
                }
                "in" => {
                    param.scope = self.in_scope(draft)?;
                    break;
                }
                _ => break,
            }
        }
        draft.graph.params.push(param);
        draft.params.push(links);
        Ok(())
    }

    /// `in 3`, if it comes next.
    fn in_scope(&mut self, draft: &mut Draft<'a>) -> Result<Scope, ParseError> {
        if !self.cursor.eat_word("in") {
            return Ok(Scope::new(0));
        }
        let start = self.cursor.skip();
        let scope: u32 = self.cursor.number("the number of a scope")?;
        draft.scopes.push((scope as usize, start..self.cursor.pos()));
        // Any number that is no scope is refused in `resolve`; the largest is no entity at all.
        Ok(Scope::new((scope as usize).min(u32::MAX as usize - 1)))
    }

    /// `%h = matmul(transpose_b:true) %x, %w : bf16[32, 64] @ [dp, tp] pinned like=%y in 1`
    fn node(&mut self, draft: &mut Draft<'a>) -> Result<(), ParseError> {
        let mut names = SmallVec::<[Spanned<'a>; 2]>::new();
        loop {
            names.push(self.value_name()?);
            if !self.cursor.eat(b',') {
                break;
            }
        }
        self.cursor.expect(b'=')?;
        let op = match self.call(Some(&draft.graph.mesh))? {
            Call::Op(op) => op,
            Call::Collective(kind, axes) => Collective { kind, axes }.into(),
            Call::Copy => unreachable!("`copy` is read in plans only"),
        };
        let n_inputs = match self.cursor.byte() {
            Some(b'%') => self.value_names(&mut draft.inputs)?,
            _ => 0,
        };
        let Some(section) = draft.section else {
            let message = "a node needs a section above it, such as `forward:`".to_string();
            return Err(self.cursor.error(names[0].span.clone(), message));
        };
        let is_collective = matches!(op, Op::Collective(_));
        if is_collective && n_inputs != names.len() {
            let message = format!("{n_inputs} operands and {} results", names.len());
            return Err(self.cursor.error(names[0].span.clone(), message));
        }
        let node = draft.graph.nodes.next_key();
        let mut results = SmallVec::new();
        let n_results = names.len();
        for (index, name) in names.into_iter().enumerate() {
            let separator = if index == 0 { b':' } else { b',' };
            if index > 0 && self.cursor.byte() != Some(b',') {
                let what = format!("`,` and a type: there are {n_results} results");
                return Err(self.cursor.expected(&what));
            }
            self.cursor.expect(separator)?;
            let def = Def::Result { node, index: index as u32 };
            results.push(self.declare_typed(draft, name, def)?);
        }
        let scope = self.in_scope(draft)?;
        // Operands are known once all names are; their number is kept.
        let inputs = SmallVec::from_elem(Value::from_u32(0), n_inputs);
        draft.graph.nodes.push(NodeData { op, inputs, results, section, scope });
        draft.graph.order.push(node);
        Ok(())
    }

    /// `store %state = %value in forward`
    fn store(&mut self, draft: &mut Draft<'a>) -> Result<(), ParseError> {
        self.cursor.word("`store`")?;
        let state = self.value_name()?;
        self.cursor.expect(b'=')?;
        let value = self.value_name()?;
        let mut section = Section::Update;
        if self.cursor.eat_word("in") {
            let word = self.cursor.peek_word();
            let Some(&(found, _)) = SECTIONS.iter().find(|it| it.1 == word) else {
                return Err(self.cursor.expected("prepare, forward, backward or update"));
            };
            self.cursor.word("a section")?;
            section = found;
        }
        draft.stores.push((state, value));
        let unknown = Value::from_u32(0);
        draft.graph.stores.push(Store { state: unknown, value: unknown, section });
        Ok(())
    }

    /// `: type @ sharding ..` of a value, and its entry.
    fn declare(
        &mut self,
        draft: &mut Draft<'a>,
        name: Spanned<'a>,
        def: Def,
    ) -> Result<Value, ParseError> {
        self.cursor.expect(b':')?;
        self.declare_typed(draft, name, def)
    }

    fn declare_typed(
        &mut self,
        draft: &mut Draft<'a>,
        name: Spanned<'a>,
        def: Def,
    ) -> Result<Value, ParseError> {
        let typed = self.typed(draft)?;
        let value = draft.graph.values.next_key();
        let text = name.name.clone().into_owned();
        match draft.names.entry(name.name) {
            Entry::Vacant(it) => it.insert(value),
            Entry::Occupied(it) => {
                let message = format!("there is a value `%{}` already", it.key());
                return Err(self.cursor.error(name.span, message));
            }
        };
        let Typed { ty, sharding, pinned, like } = typed;
        draft.likes.extend(like.map(|it| (value, it)));
        draft.graph.values.push(ValueData { name: text, ty, sharding, pinned, like: None, def });
        Ok(value)
    }

    fn typed(&mut self, draft: &Draft<'a>) -> Result<Typed<'a>, ParseError> {
        let ty = self.ty()?;
        let sharding = match self.cursor.eat(b'@') {
            true => Some(self.sharding(&draft.graph.mesh, &ty)?),
            false => None,
        };
        let pinned = self.cursor.eat_word("pinned");
        let like = match self.cursor.eat_word("like") {
            true => {
                self.cursor.expect(b'=')?;
                Some(self.value_name()?)
            }
            false => None,
        };
        Ok(Typed { ty, sharding, pinned, like })
    }

    /// Replaces names by values.
    fn resolve(&self, draft: Draft<'a>) -> Result<Graph, ParseError> {
        let Draft { mut graph, names, inputs, likes, params, stores, results, .. } = draft;
        let find = |it: &Spanned<'a>| match names.get(&it.name) {
            Some(&value) => Ok(value),
            None => {
                let message = format!("unknown value `%{}`", it.name);
                Err(self.cursor.error(it.span.clone(), message))
            }
        };
        for (scope, span) in &draft.scopes {
            self.check_scope(&graph.scopes, *scope, span)?;
        }
        for (scope, parent, span) in &draft.parents {
            self.check_scope(&graph.scopes, *parent, span)?;
            graph.scopes[*scope].parent = Some(Scope::new(*parent));
        }
        let mut inputs = inputs.iter();
        for &node in &graph.order {
            for input in &mut graph.nodes[node].inputs {
                *input = find(inputs.next().expect("one name per operand"))?;
            }
        }
        for (value, like) in &likes {
            graph.values[*value].like = Some(find(like)?);
        }
        for (param, links) in graph.params.iter_mut().zip(&params) {
            param.compute = links.compute.as_ref().map_or(Ok(param.value), find)?;
            param.full = links.full.as_ref().map_or(Ok(param.compute), find)?;
            param.grad = links.grad.as_ref().map(find).transpose()?;
        }
        for (store, (state, value)) in graph.stores.iter_mut().zip(&stores) {
            (store.state, store.value) = (find(state)?, find(value)?);
        }
        for (result, name) in graph.results.iter_mut().zip(&results) {
            result.1 = find(name)?;
        }
        Ok(graph)
    }

    fn check_scope(
        &self,
        scopes: &PrimaryMap<Scope, ScopeData>,
        number: usize,
        span: &Range<usize>,
    ) -> Result<(), ParseError> {
        match number < scopes.len() {
            true => Ok(()),
            false => Err(self.cursor.error(span.clone(), format!("there is no scope {number}"))),
        }
    }
}
