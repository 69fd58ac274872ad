//! Statements of a plan. Everything is declared before it is used.

use std::borrow::Cow;
use std::ops::Range;

use cranelift_entity::{EntityRef, PrimaryMap};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{Call, Parser, Spanned};
use crate::digest::{Digest, DigestError};
use crate::graph::Init;
use crate::plan::{
    Arena, Buffer, BufferData, Buffers, Comm, Event, Instruction, Part, Plan, PlanParam,
    PlanSection, Role, Stream, StreamData, StreamKind,
};
use crate::run::Run;
use crate::text::ParseError;
use crate::text::print::stream_name;

/// Buffers of one name, in the order of their declarations.
type Names<'a> = FxHashMap<Cow<'a, str>, SmallVec<[Buffer; 1]>>;

/// The most streams: clocks have a number for each pair of them. planc makes one, and one for each communicator.
const MAX_STREAMS: usize = 256;

/// A plan under construction.
struct Draft<'a> {
    plan: Plan,
    names: Names<'a>,
    section: Option<PlanSection>,
    seen: SmallVec<[&'a str; 4]>,
    /// The digest that the text has of itself.
    digest: Option<Digest>,
}

impl<'a> Parser<'a> {
    pub(super) fn plan(&mut self) -> Result<Plan, ParseError> {
        let header = self.header(4..7)?;
        let plan = Plan {
            name: header.name,
            mesh: header.mesh,
            phase: header.phase,
            micro_batches: header.micro_batches,
            comms: PrimaryMap::new(),
            streams: PrimaryMap::new(),
            events: header.events,
            buffers: PrimaryMap::new(),
            sections: Default::default(),
            persistent_bytes: header.persistent_bytes,
            model: None,
            step_bytes: header.step_bytes,
            params: Vec::new(),
            results: Vec::new(),
            run: Run::default(),
        };
        let (names, seen) = (FxHashMap::default(), SmallVec::new());
        let mut draft = Draft { plan, names, section: None, seen, digest: None };
        while let Some(start) = self.statement("a statement")? {
            self.plan_statement(&mut draft, start)?;
            self.cursor.end_of_line()?;
        }
        let plan = draft.plan;
        let n: usize = plan.sections.iter().map(Vec::len).sum();
        // Whoever reads a plan has something for each event.
        if plan.events as usize > n {
            let message = format!("{} events are more than the {n} instructions", plan.events);
            return Err(self.cursor.error(header.span, message));
        }
        match plan.exceeds() {
            Some(message) => Err(self.cursor.error(header.span, message)),
            None if plan.model.is_some() && draft.digest != Some(Digest::of_plan(&plan)) => {
                Ok(Plan { model: None, ..plan })
            }
            None => Ok(plan),
        }
    }

    fn plan_statement(&mut self, draft: &mut Draft<'a>, start: usize) -> Result<(), ParseError> {
        let word = self.cursor.peek_word();
        let span = start..start + word.len();
        if let Some(section) = PlanSection::ALL.into_iter().find(|it| it.name() == word) {
            self.once(draft, word, span)?;
            self.cursor.word("a section")?;
            draft.section = Some(section);
            return self.cursor.expect(b':');
        }
        match word {
            "run" => {
                self.once(draft, word, span)?;
                self.cursor.word("`run`")?;
                draft.plan.run = self.ron("data and schedule")?;
                Ok(())
            }
            "model" => {
                self.once(draft, word, span)?;
                self.cursor.word("`model`")?;
                draft.plan.model = Some(self.digest()?);
                Ok(())
            }
            // The digest of the text as planc wrote it.
            "digest" => {
                self.once(draft, word, span)?;
                self.cursor.word("`digest`")?;
                draft.digest = Some(self.digest()?);
                Ok(())
            }
            "comm" => {
                self.cursor.word("`comm`")?;
                self.next_handle('c', "a communicator", draft.plan.comms.len())?;
                self.cursor.expect(b'=')?;
                let axes = self.axes(&draft.plan.mesh)?;
                draft.plan.comms.push(axes);
                Ok(())
            }
            "stream" => {
                self.cursor.word("`stream`")?;
                let start = self.cursor.skip();
                self.next_handle('s', "a stream", draft.plan.streams.len())?;
                if draft.plan.streams.len() == MAX_STREAMS {
                    let message = format!("a plan has at most {MAX_STREAMS} streams");
                    return Err(self.cursor.error(start..self.cursor.pos(), message));
                }
                self.cursor.expect(b'=')?;
                let data = self.stream_data()?;
                draft.plan.streams.push(data);
                Ok(())
            }
            "body" => self.body_statement(),
            "buffer" => self.buffer(draft),
            "param" => self.plan_param(draft),
            "result" => {
                self.cursor.word("`result`")?;
                let name = self.result_name(&draft.plan.results)?;
                self.cursor.expect(b'=')?;
                let buffer = self.buffer_name(&draft.names)?;
                draft.plan.results.push((name, buffer));
                Ok(())
            }
            _ if word.starts_with('s') => self.instruction(draft),
            _ => Err(self.cursor.expected(
                "a statement (`s0: ..`, buffer, param, body, comm, stream, run, result or a section)",
            )),
        }
    }

    fn digest(&mut self) -> Result<Digest, ParseError> {
        let start = self.cursor.skip();
        let word = self.cursor.word("a digest")?;
        let error = |it: DigestError| self.cursor.error(start..start + word.len(), it.to_string());
        word.parse().map_err(error)
    }

    fn once(
        &self,
        draft: &mut Draft<'a>,
        word: &'a str,
        span: Range<usize>,
    ) -> Result<(), ParseError> {
        if draft.seen.contains(&word) {
            return Err(self.repeated(word, span));
        }
        draft.seen.push(word);
        Ok(())
    }

    /// A handle that is being declared: they are numbered in order.
    fn next_handle(&mut self, prefix: char, what: &str, next: usize) -> Result<(), ParseError> {
        let start = self.cursor.skip();
        let number = self.cursor.handle(prefix, what)?;
        match number as usize == next {
            true => Ok(()),
            false => {
                let message = format!("the next one must be `{prefix}{next}`");
                Err(self.cursor.error(start..self.cursor.pos(), message))
            }
        }
    }

    /// A handle that must exist.
    fn known_handle(&mut self, prefix: char, what: &str, n: usize) -> Result<usize, ParseError> {
        let start = self.cursor.skip();
        let number = self.cursor.handle(prefix, what)? as usize;
        match number < n {
            true => Ok(number),
            false => {
                let span = start..self.cursor.pos();
                Err(self.cursor.error(span, format!("`{prefix}{number}` is not declared")))
            }
        }
    }

    /// `compute workspace=67108864`
    fn stream_data(&mut self) -> Result<StreamData, ParseError> {
        let kind = self.stream_kind()?;
        let workspace = match self.cursor.eat_word("workspace") {
            true => {
                self.cursor.expect(b'=')?;
                self.cursor.number("a size in bytes")?
            }
            false => 0,
        };
        Ok(StreamData { kind, workspace })
    }

    fn stream_kind(&mut self) -> Result<StreamKind, ParseError> {
        let word = self.cursor.peek_word();
        let kinds = [StreamKind::Compute, StreamKind::Comm];
        let Some(kind) = kinds.into_iter().find(|&it| stream_name(it) == word) else {
            return Err(self.cursor.expected("compute or comm"));
        };
        self.cursor.word("a kind of stream")?;
        Ok(kind)
    }

    /// `buffer %up : bf16[4096, 1024] @ [tp.dp, _] param at 0`
    fn buffer(&mut self, draft: &mut Draft<'a>) -> Result<(), ParseError> {
        self.cursor.word("`buffer`")?;
        let name = self.value_name()?;
        self.cursor.expect(b':')?;
        let ty = self.ty()?;
        self.cursor.expect(b'@')?;
        let sharding = self.sharding(&draft.plan.mesh, &ty)?;
        let role = self.role()?;
        let mut span = name.span.clone();
        let offset = match self.cursor.eat_word("at") {
            true => {
                span = self.cursor.skip()..span.end;
                let offset = self.cursor.number("an offset in bytes")?;
                span.end = self.cursor.pos();
                Some(offset)
            }
            false => None,
        };
        let text = name.name.clone().into_owned();
        let data = BufferData { name: text, ty, sharding, role, offset };
        let buffer = draft.plan.buffers.push(data);
        draft.names.entry(name.name).or_default().push(buffer);
        self.check_offset(&draft.plan, buffer, span)
    }

    /// A buffer must lie in its arena.
    fn check_offset(
        &self,
        plan: &Plan,
        buffer: Buffer,
        span: Range<usize>,
    ) -> Result<(), ParseError> {
        let data = &plan.buffers[buffer];
        let Some(offset) = data.offset else { return Ok(()) };
        let (arena, size) = match data.role.arena() {
            Arena::Persistent => ("persistent", plan.persistent_bytes),
            Arena::Step => ("step", plan.step_bytes),
        };
        let end = offset.checked_add(plan.local_bytes(buffer));
        if end.is_some_and(|it| it <= size) {
            return Ok(());
        }
        let bytes = plan.local_bytes(buffer);
        let message =
            format!("{bytes} bytes at {offset} do not fit the {arena} arena of {size} bytes");
        Err(self.cursor.error(span, message))
    }

    fn role(&mut self) -> Result<Role, ParseError> {
        let roles = [Role::Param, Role::State, Role::Input, Role::Carried, Role::Temp];
        let word = self.cursor.peek_word();
        let Some(role) = roles.into_iter().find(|it| it.name() == word) else {
            return Err(self.cursor.expected("param, state, input, carried or temp"));
        };
        self.cursor.word("a role")?;
        Ok(role)
    }

    /// `param %up label=[tp.dp, _] init=Normal(std:0.02) aliases=(%gate)`
    fn plan_param(&mut self, draft: &mut Draft<'a>) -> Result<(), ParseError> {
        self.cursor.word("`param`")?;
        let buffer = self.buffer_name(&draft.names)?;
        let mut param = PlanParam { buffer, label: None, init: Init::Zeros, aliases: Vec::new() };
        loop {
            if self.cursor.eat_word("init") {
                self.cursor.expect(b'=')?;
                param.init = self.init()?;
            } else if self.cursor.eat_word("label") {
                self.cursor.expect(b'=')?;
                let ty = &draft.plan.buffers[buffer].ty;
                param.label = Some(self.sharding(&draft.plan.mesh, ty)?);
            } else if self.cursor.eat_word("aliases") {
                self.cursor.expect(b'=')?;
                param.aliases = self.aliases()?;
            } else {
                break;
            }
        }
        draft.plan.params.push(param);
        Ok(())
    }

    /// `s0: %h = matmul(transpose_b:true) %x, %up`, `s1: record e0`, ...
    fn instruction(&mut self, draft: &mut Draft<'a>) -> Result<(), ParseError> {
        let start = self.cursor.skip();
        let stream = self.known_handle('s', "a stream", draft.plan.streams.len())?;
        let stream = Stream::new(stream);
        let Some(section) = draft.section else {
            let message = "an instruction needs a section above it, such as `step:`".to_string();
            return Err(self.cursor.error(start..self.cursor.pos(), message));
        };
        self.cursor.expect(b':')?;
        let inst = if self.cursor.eat_word("record") {
            Instruction::Record { event: self.event(&draft.plan)?, stream }
        } else if self.cursor.eat_word("wait") {
            Instruction::Wait { event: self.event(&draft.plan)?, stream }
        } else if matches!(self.cursor.byte(), Some(b'%' | b'+')) {
            self.assignment(draft, stream)?
        } else {
            return Err(self.cursor.expected("`%result = ..`, record or wait"));
        };
        draft.plan.sections[section as usize].push(inst);
        Ok(())
    }

    fn event(&mut self, plan: &Plan) -> Result<Event, ParseError> {
        Ok(Event::new(self.known_handle('e', "an event", plan.events as usize)?))
    }

    fn assignment(&mut self, draft: &Draft<'a>, stream: Stream) -> Result<Instruction, ParseError> {
        let start = self.cursor.skip();
        let (mut results, mut adds) = (Buffers::new(), SmallVec::<[bool; 4]>::new());
        loop {
            adds.push(self.cursor.eat(b'+'));
            results.push(self.buffer_name(&draft.names)?);
            if !self.cursor.eat(b',') {
                break;
            }
        }
        let span = start..self.cursor.pos();
        self.cursor.expect(b'=')?;
        let call = self.call(None)?;
        let args = match self.cursor.byte() {
            Some(b'%') => self.buffer_names(&draft.names)?,
            _ => Buffers::new(),
        };
        let same_number = |what: &str| match args.len() == results.len() {
            true => Ok(()),
            false => {
                let message =
                    format!("{what} of {} buffers has {} results", args.len(), results.len());
                Err(self.cursor.error(span.clone(), message))
            }
        };
        if adds.contains(&true) && !matches!(call, Call::Collective(..)) {
            let message = "only a collective adds to its results".to_string();
            return Err(self.cursor.error(span, message));
        }
        match call {
            Call::Op(op) => Ok(Instruction::Compute { op, args, results, stream }),
            Call::Copy => {
                same_number("a copy")?;
                match (args.as_slice(), results.as_slice()) {
                    (&[src], &[dst]) => Ok(Instruction::Copy { src, dst, stream }),
                    _ => {
                        let message = "a copy has one operand and one result".to_string();
                        Err(self.cursor.error(span, message))
                    }
                }
            }
            Call::Collective(kind, _) => {
                same_number("a collective")?;
                if !self.cursor.eat_word("on") {
                    return Err(self.cursor.expected("`on` and a communicator"));
                }
                let comm = self.known_handle('c', "a communicator", draft.plan.comms.len())?;
                let comm = Comm::new(comm);
                let parts = args.iter().zip(&results).zip(adds);
                let parts = parts.map(|((&src, &dst), adds)| Part { src, dst, adds });
                Ok(Instruction::Collective { kind, comm, parts: parts.collect(), stream })
            }
        }
    }

    fn buffer_names(&mut self, names: &Names<'a>) -> Result<Buffers, ParseError> {
        let mut res = Buffers::new();
        loop {
            res.push(self.buffer_name(names)?);
            if !self.cursor.eat(b',') {
                return Ok(res);
            }
        }
    }

    /// `%up`, or `%up#2` for the second buffer of that name.
    fn buffer_name(&mut self, names: &Names<'a>) -> Result<Buffer, ParseError> {
        let Spanned { name, mut span } = self.value_name()?;
        let mut index = 0;
        if self.cursor.eat(b'#') {
            let number: usize = self.cursor.number("which buffer of that name")?;
            index = number.wrapping_sub(1);
            span.end = self.cursor.pos();
        }
        match names.get(&name).and_then(|it| it.get(index)) {
            Some(&buffer) => Ok(buffer),
            None => {
                let message = format!("unknown buffer `{}`", self.cursor.since(span.start));
                Err(self.cursor.error(span, message))
            }
        }
    }
}
