//! Bodies: in the table of a program, and as an attribute of an op that is printed alone.

use smallvec::SmallVec;

use super::Parser;
use crate::Op;
use crate::ops::{Body, Slot, Step};
use crate::text::ParseError;

impl<'a> Parser<'a> {
    /// `body @glu+amax (bf16, bf16) { .. }`
    pub(super) fn body_statement(&mut self) -> Result<(), ParseError> {
        self.cursor.word("`body`")?;
        let start = self.cursor.skip();
        let name = self.cursor.body_name()?;
        let span = start..self.cursor.pos();
        let body = self.body()?;
        match self.bodies.insert(name, body) {
            None => Ok(()),
            Some(_) => Err(self.cursor.error(span, format!("there is a body `{name}` already"))),
        }
    }

    /// `(bf16) { %1 = activation(kind:relu) %0 .. return %1 }`, with a line for each step.
    pub(super) fn body(&mut self) -> Result<Body, ParseError> {
        let start = self.cursor.skip();
        let mut operands = Vec::new();
        self.cursor.expect(b'(')?;
        while !self.cursor.eat(b')') {
            self.comma(operands.len())?;
            operands.push(self.dtype()?);
        }
        let span = start..self.cursor.pos();
        self.cursor.expect(b'{')?;
        let (mut steps, mut next) = (Vec::new(), operands.len());
        loop {
            self.cursor.skip_lines();
            if self.cursor.eat_word("return") {
                break;
            }
            if steps.len() == Body::MAX_STEPS {
                let what = format!("`return`, as a body has at most {} steps", Body::MAX_STEPS);
                return Err(self.cursor.expected(&what));
            }
            steps.push(self.step(&mut next)?);
            self.cursor.end_of_line()?;
        }
        let results = self.slots()?;
        self.cursor.skip_lines();
        self.cursor.expect(b'}')?;
        Body::new(operands, steps, results).map_err(|it| self.cursor.error(span, it.to_string()))
    }

    /// `%3, %4 = glu_grad(kind:swiglu) %0, %1, %2`, where `next` is the first number that is free.
    fn step(&mut self, next: &mut usize) -> Result<Step, ParseError> {
        let start = self.cursor.skip();
        let made = self.slots()?;
        let numbers = *next..*next + made.len();
        if !numbers.clone().eq(made.iter().map(|&it| usize::from(it))) {
            let message = format!("values are numbered in order: the next one is `%{next}`");
            return Err(self.cursor.error(start..self.cursor.pos(), message));
        }
        *next = numbers.end;
        self.cursor.expect(b'=')?;
        let op: Op = self.op()?;
        let inputs = match self.cursor.byte() {
            Some(b'%') => self.slots()?,
            _ => SmallVec::new(),
        };
        Ok(Step { op, inputs, n_results: made.len() as u8 })
    }

    /// `%3, %4`
    fn slots(&mut self) -> Result<SmallVec<[Slot; 4]>, ParseError> {
        let mut res = SmallVec::new();
        loop {
            self.cursor.expect(b'%')?;
            let start = self.cursor.skip();
            let slot: Slot = self.cursor.number("the number of a value")?;
            if res.len() == Body::MAX_SLOTS {
                let message = format!("a body has at most {} values", Body::MAX_SLOTS);
                return Err(self.cursor.error(start..self.cursor.pos(), message));
            }
            res.push(slot);
            if !self.cursor.eat(b',') {
                return Ok(res);
            }
        }
    }
}
